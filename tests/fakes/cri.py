"""The real server on a real Unix socket, over fakes, and a client that behaves as kubelet."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.world import IMAGE, LOG_DIRECTORY, Outside, World

from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.config.settings import Cri
from virtshim.cri.images import ImageServicer
from virtshim.cri.server import RuntimeServicer

SERVICES = [pb.DESCRIPTOR.services_by_name[name] for name in ("RuntimeService", "ImageService")]
RPCS = {method.name: method for service in SERVICES for method in service.methods}
# What the servicers define themselves; the rest is answered UNIMPLEMENTED.
SERVED = sorted(
    name
    for name in RPCS
    for ours, generated in (
        (RuntimeServicer, api_pb2_grpc.RuntimeServiceServicer),
        (ImageServicer, api_pb2_grpc.ImageServiceServicer),
    )
    if getattr(ours, name, None) is not getattr(generated, name, None)
)

CALL_SECONDS = 20.0
MESSAGE_BYTES = 16 << 20


class Client:
    """`client.RunPodSandbox(request)` for every RPC of both services; no call may hang."""

    def __init__(self, socket: str) -> None:
        sizes = [("grpc.max_receive_message_length", MESSAGE_BYTES), ("grpc.max_send_message_length", MESSAGE_BYTES)]
        self.address = f"unix:{socket}"
        self.channel = grpc.insecure_channel(self.address, options=sizes)
        self.runtime = api_pb2_grpc.RuntimeServiceStub(self.channel)
        self.image = api_pb2_grpc.ImageServiceStub(self.channel)

    def __getattr__(self, rpc: str) -> Any:
        method = getattr(self.runtime, rpc, None) or getattr(self.image, rpc)
        return lambda request, timeout=CALL_SECONDS: method(request, timeout=timeout)

    # --- calls with everything that does not matter filled in

    def pull(self, image: str = IMAGE) -> str:
        answer: pb.PullImageResponse = self.PullImage(pb.PullImageRequest(image=pb.ImageSpec(image=image)))
        return answer.image_ref

    def run(self, *args: Any, handler: str = "", **changes: Any) -> str:
        request = pb.RunPodSandboxRequest(config=pod(*args, **changes), runtime_handler=handler)
        answer: pb.RunPodSandboxResponse = self.RunPodSandbox(request)
        return answer.pod_sandbox_id

    def create(self, sandbox: str, *args: Any, **changes: Any) -> str:
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=container(*args, **changes))
        answer: pb.CreateContainerResponse = self.CreateContainer(request)
        return answer.container_id

    def start(self, container_id: str) -> None:
        self.StartContainer(pb.StartContainerRequest(container_id=container_id))

    def stop(self, container_id: str, timeout: int = 0) -> None:
        self.StopContainer(pb.StopContainerRequest(container_id=container_id, timeout=timeout))

    def remove(self, container_id: str) -> None:
        self.RemoveContainer(pb.RemoveContainerRequest(container_id=container_id))

    def stop_pod(self, sandbox: str) -> None:
        self.StopPodSandbox(pb.StopPodSandboxRequest(pod_sandbox_id=sandbox))

    def remove_pod(self, sandbox: str) -> None:
        self.RemovePodSandbox(pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox))

    def running(self, *args: Any, **changes: Any) -> tuple[str, str]:
        sandbox = self.run(*args, **changes)
        made = self.create(sandbox)
        self.start(made)
        return sandbox, made

    def pod_status(self, sandbox: str) -> pb.PodSandboxStatus:
        request = pb.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        answer: pb.PodSandboxStatusResponse = self.PodSandboxStatus(request)
        return answer.status

    def status(self, container_id: str) -> pb.ContainerStatus:
        request = pb.ContainerStatusRequest(container_id=container_id)
        answer: pb.ContainerStatusResponse = self.ContainerStatus(request)
        return answer.status

    def pods(self, **wanted: Any) -> list[pb.PodSandbox]:
        request = (
            pb.ListPodSandboxRequest(filter=pb.PodSandboxFilter(**wanted)) if wanted else pb.ListPodSandboxRequest()
        )
        return list(self.ListPodSandbox(request).items)

    def containers(self, **wanted: Any) -> list[pb.Container]:
        request = (
            pb.ListContainersRequest(filter=pb.ContainerFilter(**wanted)) if wanted else pb.ListContainersRequest()
        )
        return list(self.ListContainers(request).containers)


def pod(name: str = "web", attempt: int = 0, **changes: Any) -> pb.PodSandboxConfig:
    config: dict[str, Any] = {
        "metadata": pb.PodSandboxMetadata(name=name, namespace="default", uid=f"uid-of-{name}", attempt=attempt),
        "hostname": name,
        "log_directory": LOG_DIRECTORY,
    }
    return pb.PodSandboxConfig(**config | changes)


def container(name: str = "vm", attempt: int = 0, **changes: Any) -> pb.ContainerConfig:
    config: dict[str, Any] = {
        "metadata": pb.ContainerMetadata(name=name, attempt=attempt),
        "image": pb.ImageSpec(image=IMAGE, user_specified_image=IMAGE),
        "log_path": f"{name}/{attempt}.log",
    }
    return pb.ContainerConfig(**config | changes)


@contextlib.contextmanager
def refused(code: grpc.StatusCode, says: str = ".") -> Iterator[list[str]]:
    """Asserts that the call inside fails with that code and a matching message. Yields a list that then holds the
    message."""
    message: list[str] = []
    with pytest.raises(grpc.RpcError) as error:
        yield message
    assert error.value.code() is code, error.value.details()
    details = error.value.details() or ""
    assert re.search(says, details), details
    message.append(details)


@contextlib.contextmanager
def served(
    directory: Path, outside: Outside | None = None, *, cri: Mapping[str, Any] | None = None
) -> Iterator[tuple[World, Client, str]]:
    """A daemon that has recovered and serves. The socket has a short path, because an address holds 107 bytes."""
    short = tempfile.mkdtemp(prefix="cri-")
    outside = outside or Outside()
    outside.vms.by_itself = True
    world = World(directory, outside, cri=Cri(socket=f"{short}/s", **cri or {}))
    world.app.recovery.recover.run(rebooted=False)
    server = world.app.server(world.settings)
    server.start()
    client = Client(world.settings.cri_socket)
    try:
        yield world, client, world.settings.cri_socket
    finally:
        client.channel.close()
        server.stop(0)
        outside.vms.close()
        outside.vms.forget()
        world.close()
        shutil.rmtree(short)
