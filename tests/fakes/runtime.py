"""A small CRI runtime of records alone, for the proxy's tests: it records its requests and returns scripted answers.

As a program (`python -m fakes.runtime SOCKET NAME PODS`) it can be stopped and killed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import grpc

from criproto.runtime_v1 import api_pb2 as pb

RUNTIME = "/runtime.v1.RuntimeService/"
IMAGES = "/runtime.v1.ImageService/"
_STREAMED = {
    "GetContainerEvents", "StreamPodSandboxes", "StreamContainers", "StreamImages", "StreamPodSandboxStats", "MadeUpStream",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    request: bytes
    metadata: dict[str, str | bytes]
    remaining: float
    at: int = field(default_factory=time.monotonic_ns)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that is returned instead of an answer."""

    code: grpc.StatusCode
    details: str = ""
    trailing: Sequence[tuple[str, str | bytes]] = ()


class FakeRuntime(grpc.GenericRpcHandler):
    """`with FakeRuntime(socket, "name") as runtime`. `answers` by a method's name: bytes, a Refusal, or a function of request
    and context."""

    def __init__(self, socket: str, name: str) -> None:
        self.socket = socket
        self.name = name
        self.calls: list[Call] = []
        self.answers: dict[str, Any] = {}
        self.pods: dict[str, pb.PodSandbox] = {}
        self.containers: dict[str, pb.Container] = {}
        self.images: dict[str, pb.Image] = {}
        self.configs: dict[str, pb.ContainerConfig] = {}
        self.needs_images = False
        """A container of an image that is not there is refused."""
        self.listeners: list[queue.Queue[bytes | None]] = []
        self._server: grpc.Server | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)
        sizes = [("grpc.max_receive_message_length", 16 << 20), ("grpc.max_send_message_length", -1)]
        self._server = grpc.server(ThreadPoolExecutor(256), options=sizes)
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def stop(self) -> None:
        if self._server:
            for listener in list(self.listeners):
                listener.put(None)
            self._server.stop(0).wait()
            self._server = None

    @property
    def is_up(self) -> bool:
        return self._server is not None

    def asked(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.method.endswith(f"/{name}")]

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        name = method.rpartition("/")[2]
        if name == "MadeUpTalk":
            return grpc.stream_stream_rpc_method_handler(lambda requests, _: (b"heard " + one for one in requests))
        streamed = name in _STREAMED

        def answer(request: bytes, context: Any) -> Any:
            metadata = {item.key: item.value for item in context.invocation_metadata()}
            self.calls.append(Call(method, request, metadata, context.time_remaining()))
            told: Any = self.answers.get(name) or getattr(self, f"_{name}", None)
            if isinstance(told, Refusal):
                context.set_trailing_metadata(tuple(told.trailing))
                context.abort(told.code, told.details)
            if told is None:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{self.name} does not know {name}")
            return told if isinstance(told, bytes) else told(request, context)

        if streamed:
            return grpc.unary_stream_rpc_method_handler(lambda request, context: _pieces(answer(request, context)))
        return grpc.unary_unary_rpc_method_handler(answer)

    # --- what it does unless told otherwise

    def _Version(self, _request: bytes, _context: Any) -> bytes:
        return pb.VersionResponse(
            version="0.1.0", runtime_name=self.name, runtime_version="1.0.0", runtime_api_version="v1"
        ).SerializeToString()

    def _Status(self, _request: bytes, _context: Any) -> bytes:
        status = pb.StatusResponse(
            runtime_handlers=[pb.RuntimeHandler(name=""), pb.RuntimeHandler(name=f"of-{self.name}")]
        )
        for kind in ("RuntimeReady", "NetworkReady"):
            status.status.conditions.add(type=kind, status=True)
        return status.SerializeToString()

    def _RuntimeConfig(self, _request: bytes, _context: Any) -> bytes:
        linux = pb.LinuxRuntimeConfiguration(cgroup_driver=pb.CGROUPFS)
        return pb.RuntimeConfigResponse(linux=linux).SerializeToString()

    def _UpdateRuntimeConfig(self, _request: bytes, _context: Any) -> bytes:
        return b""

    def _RunPodSandbox(self, request: bytes, _context: Any) -> bytes:
        asked = pb.RunPodSandboxRequest.FromString(request)
        made = self.add_pod(asked.config.metadata, asked.runtime_handler)
        self.pods[made].annotations.update(asked.config.annotations)
        return pb.RunPodSandboxResponse(pod_sandbox_id=made).SerializeToString()

    def add_pod(self, metadata: pb.PodSandboxMetadata | None = None, handler: str = "") -> str:
        made = secrets.token_hex(32)
        self.pods[made] = pb.PodSandbox(
            id=made, metadata=metadata, state=pb.SANDBOX_READY, created_at=1, runtime_handler=handler
        )
        return made

    def add_container(
        self,
        pod: str,
        config: pb.ContainerConfig | None = None,
        state: pb.ContainerState.ValueType = pb.CONTAINER_RUNNING,
    ) -> str:
        made, config = secrets.token_hex(32), config or pb.ContainerConfig()
        self.containers[made] = pb.Container(
            id=made, pod_sandbox_id=pod, state=state, created_at=1, metadata=config.metadata,
            image=config.image, image_ref=config.image.image, image_id=config.image.image, labels=config.labels,
        )  # fmt: skip
        self.configs[made] = config
        return made

    def _CreateContainer(self, request: bytes, context: Any) -> bytes:
        asked = pb.CreateContainerRequest.FromString(request)
        if asked.pod_sandbox_id not in self.pods:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no sandbox {asked.pod_sandbox_id}")
        named = [asked.config.image, *(mount.image for mount in asked.config.mounts)]
        missing = [one.image for one in named if one.image and not self._image(one.image)]
        if self.needs_images and missing:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{self.name} has no image {missing[0]}")
        made = self.add_container(asked.pod_sandbox_id, asked.config, pb.CONTAINER_CREATED)
        return pb.CreateContainerResponse(container_id=made).SerializeToString()

    def _StartContainer(self, request: bytes, context: Any) -> bytes:
        wanted = pb.StartContainerRequest.FromString(request).container_id
        if wanted not in self.containers:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{self.name} has no container {wanted}")
        self.containers[wanted].state = pb.CONTAINER_RUNNING
        return b""

    def _ContainerStatus(self, request: bytes, context: Any) -> bytes:
        wanted = pb.ContainerStatusRequest.FromString(request).container_id
        if wanted not in self.containers:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{self.name} has no container {wanted}")
        one, config = self.containers[wanted], self.configs[wanted]
        status = pb.ContainerStatus(
            id=one.id, metadata=one.metadata, state=one.state, created_at=one.created_at, image=one.image,
            image_ref=one.image_ref, image_id=one.image_id, mounts=config.mounts, log_path=f"/logs/{config.log_path}",
        )  # fmt: skip
        return pb.ContainerStatusResponse(status=status, info={"of": self.name}).SerializeToString()

    def _PodSandboxStatus(self, request: bytes, context: Any) -> bytes:
        wanted = pb.PodSandboxStatusRequest.FromString(request).pod_sandbox_id
        found = [one for one in self.pods if wanted and one.startswith(wanted)]
        if len(found) != 1:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{self.name} has no sandbox {wanted}")
        one = self.pods[found[0]]
        status = pb.PodSandboxStatus(
            id=one.id, metadata=one.metadata, state=one.state, runtime_handler=one.runtime_handler
        )
        return pb.PodSandboxStatusResponse(status=status).SerializeToString()

    def _ListPodSandbox(self, request: bytes, _context: Any) -> bytes:
        wanted = pb.ListPodSandboxRequest.FromString(request).filter
        found = [one for one in self.pods.values() if one.id.startswith(wanted.id)]
        return pb.ListPodSandboxResponse(items=found).SerializeToString()

    def _StreamPodSandboxes(self, request: bytes, _context: Any) -> list[bytes]:
        return [pb.StreamPodSandboxesResponse(pod_sandboxes=[one]).SerializeToString() for one in self.pods.values()]

    def _ListContainers(self, request: bytes, _context: Any) -> bytes:
        wanted = pb.ListContainersRequest.FromString(request).filter
        found = [
            one
            for one in self.containers.values()
            if one.id.startswith(wanted.id) and one.pod_sandbox_id.startswith(wanted.pod_sandbox_id)
        ]
        return pb.ListContainersResponse(containers=found).SerializeToString()

    def _StreamContainers(self, request: bytes, _context: Any) -> list[bytes]:
        found = self.containers.values()
        return [pb.StreamContainersResponse(containers=[one]).SerializeToString() for one in found]

    def _Exec(self, _request: bytes, _context: Any) -> bytes:
        return pb.ExecResponse(url=f"http://127.0.0.1:1/exec/{self.name}").SerializeToString()

    def _StopContainer(self, _request: bytes, _context: Any) -> bytes:
        return b""

    def add_image(self, id_: str, *tags: str) -> None:
        self.images[id_] = pb.Image(id=id_, repo_tags=tags, size=1)

    def _image(self, wanted: str) -> pb.Image | None:
        return next((one for one in self.images.values() if wanted == one.id or wanted in one.repo_tags), None)

    def _ImageStatus(self, request: bytes, _context: Any) -> bytes:
        return pb.ImageStatusResponse(image=self._image(_named(request))).SerializeToString()

    def _PullImage(self, request: bytes, _context: Any) -> bytes:
        name = pb.PullImageRequest.FromString(request).image.image
        self.add_image(f"sha256:{self.name}", name)
        return pb.PullImageResponse(image_ref=f"sha256:{self.name}").SerializeToString()

    def _RemoveImage(self, request: bytes, _context: Any) -> bytes:
        if image := self._image(_named(request)):
            del self.images[image.id]
        return b""

    def _ListImages(self, _request: bytes, _context: Any) -> bytes:
        return pb.ListImagesResponse(images=self.images.values()).SerializeToString()

    def _ImageFsInfo(self, _request: bytes, _context: Any) -> bytes:
        info = pb.ImageFsInfoResponse()
        info.image_filesystems.add(fs_id=pb.FilesystemIdentifier(mountpoint=f"/{self.name}"))
        return info.SerializeToString()

    def _GetContainerEvents(self, _request: bytes, context: Any) -> Iterator[bytes]:
        events: queue.Queue[bytes | None] = queue.Queue()
        self.listeners.append(events)

        def leave() -> None:
            self.listeners.remove(events)
            events.put(None)

        context.add_callback(leave)
        context.send_initial_metadata(())
        return iter(events.get, None)

    def tell(self, container: str, pod: pb.PodSandboxStatus | None = None, **more: Any) -> None:
        """Sends an event to all listeners."""
        event = pb.ContainerEventResponse(container_id=container, pod_sandbox_status=pod, **more).SerializeToString()
        for listener in list(self.listeners):
            listener.put(event)


def _named(request: bytes) -> str:
    return pb.ImageStatusRequest.FromString(request).image.image


def _pieces(answer: Any) -> Iterator[bytes]:
    return iter([answer] if isinstance(answer, bytes) else answer)


def _add_as_kubelet(runtime: FakeRuntime, number: int) -> None:
    """Adds a pod of a Deployment with what kubelet writes to each: some 700 bytes in a list."""
    name, uid = f"web-7d4b9c6f5d-{number:05}", f"3f2b8c1e-77aa-4b1d-9c0e-{number:012}"
    made = runtime.pods[runtime.add_pod(pb.PodSandboxMetadata(name=name, namespace="default", uid=uid))]
    made.labels.update(
        {
            "io.kubernetes.pod.name": name, "io.kubernetes.pod.namespace": "default", "io.kubernetes.pod.uid": uid,
            "app.kubernetes.io/name": "web", "app.kubernetes.io/instance": "web", "pod-template-hash": "7d4b9c6f5d",
        }
    )  # fmt: skip
    made.annotations.update(
        {"kubernetes.io/config.seen": "2026-11-22T19:41:16.123456789Z", "kubernetes.io/config.source": "api"}
    )


if __name__ == "__main__":
    with FakeRuntime(sys.argv[1], sys.argv[2]) as alone:
        for number in range(int(sys.argv[3])):
            _add_as_kubelet(alone, number)
        print("ready", flush=True)
        sys.stdin.read()
