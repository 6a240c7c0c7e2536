"""A small CRI client for the demo, the benchmark and the tests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc

_MESSAGE_BYTES = 16 << 20


class PodClient:
    """`with PodClient("/run/virtshim/virtshim.sock") as node: ...`; `node.runtime` and `node.images` are gRPC's stubs."""

    def __init__(self, socket_path: str, timeout: float = 120.0) -> None:
        self._channel = grpc.insecure_channel(
            f"unix:{socket_path}",
            options=[
                ("grpc.max_receive_message_length", _MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MESSAGE_BYTES),
            ],
        )
        self.timeout = timeout
        self.runtime = api_pb2_grpc.RuntimeServiceStub(self._channel)
        self.images = api_pb2_grpc.ImageServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self._channel.close()

    def run_pod(self, config: pb.PodSandboxConfig, handler: str = "") -> str:
        request = pb.RunPodSandboxRequest(config=config, runtime_handler=handler)
        return self.runtime.RunPodSandbox(request, timeout=self.timeout).pod_sandbox_id

    def pull(self, reference: str, auth: pb.AuthConfig | None = None) -> str:
        request = pb.PullImageRequest(image=pb.ImageSpec(image=reference), auth=auth)
        return self.images.PullImage(request, timeout=self.timeout).image_ref

    def remove_image(self, reference: str) -> None:
        self.images.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=reference)), timeout=60)

    def create(self, pod: str, config: pb.ContainerConfig, pod_config: pb.PodSandboxConfig) -> str:
        request = pb.CreateContainerRequest(pod_sandbox_id=pod, config=config, sandbox_config=pod_config)
        return self.runtime.CreateContainer(request, timeout=self.timeout).container_id

    def start(self, container: str) -> None:
        self.runtime.StartContainer(pb.StartContainerRequest(container_id=container), timeout=self.timeout)

    def stop(self, container: str, grace: int) -> None:
        request = pb.StopContainerRequest(container_id=container, timeout=grace)
        self.runtime.StopContainer(request, timeout=self.timeout + grace)

    def remove(self, container: str) -> None:
        self.runtime.RemoveContainer(pb.RemoveContainerRequest(container_id=container), timeout=self.timeout)

    def exec_sync(self, container: str, *command: str, timeout: int = 0) -> pb.ExecSyncResponse:
        request = pb.ExecSyncRequest(container_id=container, cmd=command, timeout=timeout)
        return self.runtime.ExecSync(request, timeout=self.timeout + timeout)

    def stop_pod(self, pod: str) -> None:
        self.runtime.StopPodSandbox(pb.StopPodSandboxRequest(pod_sandbox_id=pod), timeout=self.timeout)

    def remove_pod(self, pod: str) -> None:
        self.runtime.RemovePodSandbox(pb.RemovePodSandboxRequest(pod_sandbox_id=pod), timeout=self.timeout)

    def pod_status(self, pod: str) -> pb.PodSandboxStatus:
        request = pb.PodSandboxStatusRequest(pod_sandbox_id=pod)
        return self.runtime.PodSandboxStatus(request, timeout=self.timeout).status

    def pod_ip(self, pod: str) -> str:
        return self.pod_status(pod).network.ip

    def status(self, container: str) -> pb.ContainerStatus:
        request = pb.ContainerStatusRequest(container_id=container)
        return self.runtime.ContainerStatus(request, timeout=self.timeout).status

    def pods(self) -> list[pb.PodSandbox]:
        return list(self.runtime.ListPodSandbox(pb.ListPodSandboxRequest(), timeout=self.timeout).items)

    def containers(self) -> list[pb.Container]:
        return list(self.runtime.ListContainers(pb.ListContainersRequest(), timeout=self.timeout).containers)


def pod_config(
    name: str,
    log_directory: str,
    annotations: Mapping[str, str] | None = None,
    namespace: str = "default",
) -> pb.PodSandboxConfig:
    """Filled as by kubelet, with a new UID."""
    uid = str(uuid.uuid4())
    return pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(name=name, namespace=namespace, uid=uid, attempt=0),
        hostname=name,
        log_directory=log_directory,
        dns_config=pb.DNSConfig(servers=["10.96.0.10"], searches=["default.svc.cluster.local"], options=["ndots:5"]),
        labels={
            "io.kubernetes.pod.name": name,
            "io.kubernetes.pod.namespace": namespace,
            "io.kubernetes.pod.uid": uid,
        },
        annotations=annotations or {},
        linux=pb.LinuxPodSandboxConfig(),
    )


def container_config(image: str, memory: int = 128 << 20, name: str = "vm", attempt: int = 0) -> pb.ContainerConfig:
    """`memory` in bytes."""
    return pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name=name, attempt=attempt),
        image=pb.ImageSpec(image=image),
        log_path=f"{name}/{attempt}.log",
        labels={"io.kubernetes.container.name": name},
        annotations={"io.kubernetes.container.hash": "1234"},
        linux=pb.LinuxContainerConfig(resources=pb.LinuxContainerResources(memory_limit_in_bytes=memory)),
    )


def log_lines(path: str) -> list[str]:
    """The lines of a CRI log, with partial ones joined."""
    lines: list[str] = [""]
    for raw in (
        Path(path).read_bytes().decode(errors="replace").split("\n")[:-1]
    ):  # a console writes carriage returns too
        _stamp, _stream, tag, text = (*raw.split(" ", 3), "")[:4]
        lines[-1] += text
        if tag == "F":
            lines.append("")
    return lines if lines[-1] else lines[:-1]


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Polls `condition`. Raises TimeoutError, which names `what`."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


def wait_for_log(path: str, text: str, seconds: float) -> str:
    """The first console line that contains `text`."""
    found: list[str] = []

    def seen() -> bool:
        found[:] = [line for line in log_lines(path) if text in line]
        return bool(found)

    try:
        wait_until(seen, seconds, f"{text!r} on the console")
    except TimeoutError as exc:
        tail = "\n".join(log_lines(path)[-15:])
        raise TimeoutError(f"{exc}; the console's last lines:\n{tail}") from exc
    return found[0]
