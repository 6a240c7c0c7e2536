"""What virtshim's command line does by CRI beside looking: images, pulls, usage, events, logs, and VMs by hand."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.cri.client import as_shim_errors, refuse_others_socket

_SECONDS: Final = 30.0
# A pull has its own limits on the node.
_PULL_SECONDS: Final = 24 * 3600.0
_START_SECONDS: Final = 240.0
_MESSAGE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class ImageSummary:
    """`size` in bytes."""

    id: str
    names: tuple[str, ...]
    digests: tuple[str, ...]
    size: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class PodUsage:
    """Counters since its start, but for `memory`, what is in use, and `disk`; in bytes, `cpu` and `at` in seconds."""

    pod: str
    at: float
    cpu: float
    memory: int
    disk: int
    received: int
    sent: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How a VM is. `code` counts for one that has ended."""

    is_over: bool
    code: int
    reason: str
    message: str
    log: str


@dataclass(frozen=True, slots=True)
class Happened:
    """`at` in seconds since 1970."""

    at: float
    what: str
    id: str
    pod: str


@dataclass(frozen=True, slots=True)
class WantedVm:
    """`memory` in bytes, `cpus` in cores; 0: the node's default."""

    name: str
    image: str
    namespace: str = "default"
    annotations: Mapping[str, str] | None = None
    env: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()
    memory: int = 0
    cpus: float = 0.0
    handler: str = ""
    tty: bool = False


class Pull:
    """One that goes on in the background."""

    def __init__(self, future: Any) -> None:
        self._future = future  # gRPC has no name for its type

    def is_over(self, seconds: float) -> bool:
        """Waits that long for it."""
        try:
            self._future.exception(timeout=seconds)
        except grpc.FutureTimeoutError:
            return False
        return True

    def image_id(self) -> str:
        """Waits for its end. Raises ShimError."""
        with as_shim_errors():
            return str(self._future.result().image_ref)

    def cancel(self) -> None:
        """Nothing happens if it is over."""
        self._future.cancel()


class NodeWork:
    """Calls raise ShimError, with the kind and message that the node sent."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._runtime = api_pb2_grpc.RuntimeServiceStub(channel)
        self._images = api_pb2_grpc.ImageServiceStub(channel)

    def images(self) -> Sequence[ImageSummary]:
        with as_shim_errors():
            found = self._images.ListImages(pb.ListImagesRequest(), timeout=_SECONDS).images
        return [ImageSummary(i.id, tuple(i.repo_tags), tuple(i.repo_digests), i.size, i.pinned) for i in found]

    def pull(self, image: str, login: tuple[str, str] | None = None) -> Pull:
        auth = pb.AuthConfig(username=login[0], password=login[1]) if login else None
        request = pb.PullImageRequest(image=pb.ImageSpec(image=image), auth=auth)
        return Pull(self._images.PullImage.future(request, timeout=_PULL_SECONDS))

    def has_image(self, image: str) -> bool:
        with as_shim_errors():
            request = pb.ImageStatusRequest(image=pb.ImageSpec(image=image))
            return self._images.ImageStatus(request, timeout=_SECONDS).HasField("image")

    def usage(self) -> Sequence[PodUsage]:
        with as_shim_errors():
            found = self._runtime.ListPodSandboxStats(pb.ListPodSandboxStatsRequest(), timeout=_SECONDS).stats
        return [_usage(one) for one in found]

    def events(self) -> Iterator[Happened]:
        with as_shim_errors():
            for one in self._runtime.GetContainerEvents(pb.GetEventsRequest()):
                metadata = one.pod_sandbox_status.metadata
                what = pb.ContainerEventType.Name(one.container_event_type)
                what = what.removeprefix("CONTAINER_").removesuffix("_EVENT").lower()
                subject = "pod" if one.container_id == one.pod_sandbox_status.id else "vm"
                pod = f"{metadata.namespace}/{metadata.name}"
                yield Happened(one.created_at / 1e9, f"{subject} {what}", one.container_id, pod)

    def how_is(self, vm: str) -> Ended:
        with as_shim_errors():
            request = pb.ContainerStatusRequest(container_id=vm)
            status = self._runtime.ContainerStatus(request, timeout=_SECONDS).status
        is_over = status.state == pb.CONTAINER_EXITED
        return Ended(is_over, status.exit_code, status.reason, status.message, status.log_path)

    def make_pod(self, wanted: WantedVm, mark: str) -> str:
        """A pod sandbox with the label `mark`, by which `remove_marked` finds it, whatever becomes of this call."""
        request = pb.RunPodSandboxRequest(config=_pod(wanted, mark), runtime_handler=wanted.handler)
        with as_shim_errors():
            return self._runtime.RunPodSandbox(request, timeout=_START_SECONDS).pod_sandbox_id

    def start_vm(self, pod: str, wanted: WantedVm, mark: str) -> str:
        """Its id; its QEMU runs."""
        request = pb.CreateContainerRequest(
            pod_sandbox_id=pod, config=_container(wanted), sandbox_config=_pod(wanted, mark)
        )
        with as_shim_errors():
            made = self._runtime.CreateContainer(request, timeout=_START_SECONDS).container_id
            self._runtime.StartContainer(pb.StartContainerRequest(container_id=made), timeout=_START_SECONDS)
        return made

    def attach_url(self, vm: str, *, tty: bool) -> str:
        """Of the command's own input and output."""
        request = pb.AttachRequest(container_id=vm, stdin=True, stdout=True, stderr=not tty, tty=tty)
        with as_shim_errors():
            return self._runtime.Attach(request, timeout=_SECONDS).url

    def remove_marked(self, mark: str) -> None:
        """Every pod with that mark, with all that is in it."""
        wanted = pb.ListPodSandboxRequest(filter=pb.PodSandboxFilter(label_selector={MARK: mark}))
        with as_shim_errors():
            for pod in self._runtime.ListPodSandbox(wanted, timeout=_SECONDS).items:
                stop = pb.StopPodSandboxRequest(pod_sandbox_id=pod.id)
                self._runtime.StopPodSandbox(stop, timeout=_START_SECONDS)
                remove = pb.RemovePodSandboxRequest(pod_sandbox_id=pod.id)
                self._runtime.RemovePodSandbox(remove, timeout=_START_SECONDS)


MARK: Final = "virtshim.io/run"


def _pod(wanted: WantedVm, mark: str) -> pb.PodSandboxConfig:
    """The same for each call with that mark."""
    return pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(
            name=wanted.name, namespace=wanted.namespace, uid=str(uuid.uuid5(uuid.NAMESPACE_OID, mark)), attempt=0
        ),
        hostname=wanted.name[:63],
        labels={MARK: mark},
        annotations=dict(wanted.annotations or {}),
        linux=pb.LinuxPodSandboxConfig(),
    )


def _container(wanted: WantedVm) -> pb.ContainerConfig:
    resources = pb.LinuxContainerResources(memory_limit_in_bytes=wanted.memory)
    if wanted.cpus:
        resources.cpu_period, resources.cpu_quota = 100_000, int(100_000 * wanted.cpus)
    return pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name="vm", attempt=0),
        image=pb.ImageSpec(image=wanted.image),
        command=wanted.command,
        envs=[pb.KeyValue(key=key, value=value.encode()) for key, value in wanted.env],
        stdin=True,
        tty=bool(wanted.command) and wanted.tty,
        linux=pb.LinuxContainerConfig(resources=resources),
    )


def _usage(one: pb.PodSandboxStats) -> PodUsage:
    linux = one.linux
    network = linux.network.default_interface
    return PodUsage(
        pod=one.attributes.id,
        at=linux.cpu.timestamp / 1e9,
        cpu=linux.cpu.usage_core_nano_seconds.value / 1e9,
        memory=linux.memory.working_set_bytes.value,
        disk=sum(container.writable_layer.used_bytes.value for container in linux.containers),
        received=network.rx_bytes.value,
        sent=network.tx_bytes.value,
    )


@contextlib.contextmanager
def working(socket: str) -> Iterator[NodeWork]:
    """On the node that serves CRI on this Unix socket. Raises PermissionRefused for one that is somebody else's."""
    refuse_others_socket(socket)
    options = [
        ("grpc.max_receive_message_length", _MESSAGE_BYTES),
        # By default up to two minutes between attempts: `virtshim run` waits one for a virtshim that is restarted.
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        yield NodeWork(channel)
