"""The clients of the CRI socket and the admin socket, for virtshim's command line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from criproto.admin_v1 import admin_pb2, admin_pb2_grpc
from criproto.operator_v1 import operator_pb2, operator_pb2_grpc
from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.annotations.parse import VNC_ANNOTATION
from virtshim.cri.error_codes import kind_of
from virtshim.guest.operation import Action
from virtshim.model import errors
from virtshim.model.errors import InvalidRequest, NotFound, PermissionRefused, ShimError, Unavailable
from virtshim.streaming.ports import Streams

_SECONDS: Final = 30.0
# Seconds that the node gives a guest agent to answer.
_AGENT_SECONDS: Final = 30.0
_ADMIN_SECONDS: Final = 60.0
# The node writes a guest's memory in ten minutes, or gives up.
_SAVE_SECONDS: Final = 660.0
# The node has its own limits for a pull.
_PULL_SECONDS: Final = 24 * 3600.0
_START_SECONDS: Final = 240.0
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 64 << 20),  # an answer on the admin socket may be a screenshot
    # A restarted virtshim is back soon, but by default gRPC waits up to two minutes between attempts.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_ERRORS: Final = {
    error.kind: error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, ShimError) and error is not ShimError
}


def open_channel(socket: str) -> grpc.Channel:
    """A channel to a Unix socket. An unreachable socket makes the first call fail."""
    return grpc.insecure_channel(f"unix:{socket}", options=_OPTIONS)


# --- the CRI socket


@dataclass(frozen=True, slots=True)
class PodSummary:
    """`created`: seconds since 1970."""

    id: str
    namespace: str
    name: str
    is_ready: bool
    created: float


@dataclass(frozen=True, slots=True)
class VmSummary:
    """`state`: created, running, exited or unknown. `created`: seconds since 1970. `trouble`: of a running VM, "" if there is
    none or if nobody asked."""

    id: str
    pod: str
    name: str
    attempt: int
    state: str
    image: str
    created: float
    trouble: str = ""

    @property
    def shown_state(self) -> str:
        """As `state`, but a paused VM is paused: CRI has no such state."""
        return "paused" if self.trouble.startswith("paused") else self.state


@dataclass(frozen=True, slots=True)
class ImageSummary:
    """`size`: bytes."""

    id: str
    names: tuple[str, ...]
    digests: tuple[str, ...]
    size: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class PodUsage:
    """`memory` and `disk`: bytes in use now. `received` and `sent`: bytes since the pod's start. `cpu`: seconds of CPU time since
    then. `at`: seconds since 1970."""

    pod: str
    at: float
    cpu: float
    memory: int
    disk: int
    received: int
    sent: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A VM's state. `code` is valid if `is_over`."""

    is_over: bool
    code: int
    reason: str
    message: str
    log: str


@dataclass(frozen=True, slots=True)
class Happened:
    """`at`: seconds since 1970."""

    at: float
    what: str
    id: str
    pod: str


@dataclass(frozen=True, slots=True)
class WantedVm:
    """`memory`: bytes. `cpus`: cores. 0 means the node's default."""

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
    """A pull in the background."""

    def __init__(self, future: Any) -> None:
        self._future = future  # gRPC has no name for its type

    def is_over(self, seconds: float) -> bool:
        """Waits up to `seconds` for the end."""
        try:
            self._future.exception(timeout=seconds)
        except grpc.FutureTimeoutError:
            return False
        return True

    def image_id(self) -> str:
        """Waits for the end. Raises ShimError."""
        with as_shim_errors():
            return str(self._future.result().image_ref)

    def cancel(self) -> None:
        """Does nothing if the pull is over."""
        self._future.cancel()


class NodeClient:
    """Calls raise ShimError with the kind and message that the node sent."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._runtime = api_pb2_grpc.RuntimeServiceStub(channel)
        self._images = api_pb2_grpc.ImageServiceStub(channel)
        self._admin = admin_pb2_grpc.AdminStub(channel)

    def pods(self) -> list[PodSummary]:
        """Newest first."""
        with as_shim_errors():
            items = self._runtime.ListPodSandbox(pb.ListPodSandboxRequest(), timeout=_SECONDS).items
        pods = [
            PodSummary(
                item.id,
                item.metadata.namespace,
                item.metadata.name,
                item.state == pb.SANDBOX_READY,
                item.created_at / 1e9,
            )
            for item in items
        ]
        return sorted(pods, key=lambda pod: pod.created, reverse=True)

    def vms(self) -> list[VmSummary]:
        """Newest first."""
        with as_shim_errors():
            items = self._runtime.ListContainers(pb.ListContainersRequest(), timeout=_SECONDS).containers
        return sorted(map(vm_summary, items), key=lambda vm: vm.created, reverse=True)

    def with_trouble(self, vm: VmSummary) -> VmSummary:
        """The same VM with its trouble."""
        if vm.state != "running":
            return vm
        try:
            now = self.how_is(vm.id)
        except NotFound:
            return vm
        return vm if now.is_over else dataclasses.replace(vm, trouble=now.message)

    def addresses(self, pod: str) -> list[str]:
        """The pod's IP addresses; [] if the pod is gone or no longer has a network."""
        try:
            with as_shim_errors():
                request = pb.PodSandboxStatusRequest(pod_sandbox_id=pod)
                network = self._runtime.PodSandboxStatus(request, timeout=_SECONDS).status.network
        except NotFound:
            return []
        return [ip for ip in (network.ip, *(more.ip for more in network.additional_ips)) if ip]

    def exec_url(self, vm: str, command: Sequence[str], streams: Streams) -> str:
        request = pb.ExecRequest(
            container_id=vm,
            cmd=command,
            stdin=streams.stdin,
            stdout=streams.stdout,
            stderr=streams.stderr,
            tty=streams.tty,
        )
        with as_shim_errors():
            return self._runtime.Exec(request, timeout=_SECONDS).url

    def has_vnc(self, pod: str) -> bool:
        """Whether the pod's port 5900 is its VM's screen."""
        with as_shim_errors():
            request = pb.PodSandboxStatusRequest(pod_sandbox_id=pod)
            status = self._runtime.PodSandboxStatus(request, timeout=_SECONDS).status
        return status.annotations.get(VNC_ANNOTATION) == "true"

    def add_ssh_keys(self, vm: str, user: str, keys: Sequence[str]) -> None:
        request = admin_pb2.AddSshKeysRequest(container_id=vm, user=user, keys=keys)
        with as_shim_errors():
            self._admin.AddSshKeys(request, timeout=_SECONDS + _AGENT_SECONDS)

    def console_url(self, vm: str, *, stdin: bool) -> str:
        request = admin_pb2.AttachConsoleRequest(container_id=vm, stdin=stdin)
        with as_shim_errors():
            return self._admin.AttachConsole(request, timeout=_SECONDS).url

    def images(self) -> Sequence[ImageSummary]:
        with as_shim_errors():
            found = self._images.ListImages(pb.ListImagesRequest(), timeout=_SECONDS).images
        return [ImageSummary(i.id, tuple(i.repo_tags), tuple(i.repo_digests), i.size, i.pinned) for i in found]

    def image_id(self, image: str) -> str:
        """The id of the image with that name or id, "" if there is none."""
        with as_shim_errors():
            request = pb.ImageStatusRequest(image=pb.ImageSpec(image=image))
            return self._images.ImageStatus(request, timeout=_SECONDS).image.id

    def users_of_images(self) -> Mapping[str, Sequence[str]]:
        """The names of the pods whose containers, ended ones included, use an image, by the image's id."""
        pods = {pod.id: f"{pod.namespace}/{pod.name}" for pod in self.pods()}
        with as_shim_errors():
            items = self._runtime.ListContainers(pb.ListContainersRequest(), timeout=_SECONDS).containers
        users: dict[str, list[str]] = {}
        for one in items:
            users.setdefault(one.image_id or one.image_ref, []).append(pods.get(one.pod_sandbox_id, one.pod_sandbox_id))
        return users

    def remove_image(self, image: str) -> None:
        """No error if it is missing."""
        with as_shim_errors():
            request = pb.RemoveImageRequest(image=pb.ImageSpec(image=image))
            self._images.RemoveImage(request, timeout=_START_SECONDS)

    def image_bytes(self) -> int:
        """What all images take on the node's disks."""
        with as_shim_errors():
            found = self._images.ImageFsInfo(pb.ImageFsInfoRequest(), timeout=_SECONDS).image_filesystems
        return sum(one.used_bytes.value for one in found)

    def pull(self, image: str, login: tuple[str, str] | None = None) -> Pull:
        auth = pb.AuthConfig(username=login[0], password=login[1]) if login else None
        request = pb.PullImageRequest(image=pb.ImageSpec(image=image), auth=auth)
        return Pull(self._images.PullImage.future(request, timeout=_PULL_SECONDS))

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
        """Creates a pod sandbox with the label `mark`, so that `remove_marked` finds it even if this call fails."""
        request = pb.RunPodSandboxRequest(config=_pod(wanted, mark), runtime_handler=wanted.handler)
        with as_shim_errors():
            return self._runtime.RunPodSandbox(request, timeout=_START_SECONDS).pod_sandbox_id

    def start_vm(self, pod: str, wanted: WantedVm, mark: str) -> str:
        """Creates and starts a VM. Returns its id; its QEMU runs."""
        request = pb.CreateContainerRequest(
            pod_sandbox_id=pod, config=_container(wanted), sandbox_config=_pod(wanted, mark)
        )
        with as_shim_errors():
            made = self._runtime.CreateContainer(request, timeout=_START_SECONDS).container_id
            self._runtime.StartContainer(pb.StartContainerRequest(container_id=made), timeout=_START_SECONDS)
        return made

    def attach_url(self, vm: str, *, tty: bool) -> str:
        """A URL of the command's input and output."""
        request = pb.AttachRequest(container_id=vm, stdin=True, stdout=True, stderr=not tty, tty=tty)
        with as_shim_errors():
            return self._runtime.Attach(request, timeout=_SECONDS).url

    def forward_url(self, pod: str, port: int) -> str:
        """A URL of a connection to the guest's port."""
        request = pb.PortForwardRequest(pod_sandbox_id=pod, port=[port])
        with as_shim_errors():
            return self._runtime.PortForward(request, timeout=_SECONDS).url

    def remove_marked(self, mark: str) -> None:
        """Removes every pod with that mark, with everything in it."""
        wanted = pb.ListPodSandboxRequest(filter=pb.PodSandboxFilter(label_selector={MARK: mark}))
        with as_shim_errors():
            for pod in self._runtime.ListPodSandbox(wanted, timeout=_SECONDS).items:
                stop = pb.StopPodSandboxRequest(pod_sandbox_id=pod.id)
                self._runtime.StopPodSandbox(stop, timeout=_START_SECONDS)
                remove = pb.RemovePodSandboxRequest(pod_sandbox_id=pod.id)
                self._runtime.RemovePodSandbox(remove, timeout=_START_SECONDS)


def vm_summary(item: pb.Container) -> VmSummary:
    return VmSummary(
        item.id,
        item.pod_sandbox_id,
        item.metadata.name,
        item.metadata.attempt,
        pb.ContainerState.Name(item.state).removeprefix("CONTAINER_").lower(),
        item.image.image,
        item.created_at / 1e9,
    )


MARK: Final = "virtshim.io/run"


def _pod(wanted: WantedVm, mark: str) -> pb.PodSandboxConfig:
    """The result is the same for each call with the same mark."""
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
        stdin_once=bool(wanted.command) and not wanted.tty,  # a command that reads a pipe has to see its end
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
def connected(socket: str) -> Iterator[NodeClient]:
    """Yields a client of the node that serves CRI on this Unix socket. An unreachable node makes the first call fail. Raises
    PermissionRefused for a socket that this user may not use."""
    refuse_others_socket(socket)
    with open_channel(socket) as channel:
        yield NodeClient(channel)


# --- the admin socket


@dataclass(frozen=True, slots=True)
class Pulling:
    """A running pull. `received` and `total`: bytes; `total` is 0 while it is unknown."""

    image: str
    received: int
    total: int


@dataclass(frozen=True, slots=True)
class Taken:
    """An operator's action. `at`: seconds since 1970."""

    at: float
    action: str
    vm: str
    pod: str
    message: str


@dataclass(frozen=True, slots=True)
class SavedMemory:
    """`taken`: a VM has continued from it. Times in seconds since 1970."""

    bytes: int
    saved_at: float
    lapses_at: float
    taken: bool


@dataclass(frozen=True, slots=True)
class LastingVm:
    """A VM that outlives its pods. `pod`, `pod_id` and `vm_id`: what uses it now, "" if nothing does. `disk`: bytes on the
    node."""

    namespace: str
    name: str
    container: str
    created: float
    disk: int
    pod: str
    pod_id: str
    vm_id: str
    saved: SavedMemory | None

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}/{self.container}"


def _lasting_vm(one: operator_pb2.LastingVm) -> LastingVm:
    saved = one.saved
    return LastingVm(
        namespace=one.namespace,
        name=one.name,
        container=one.container,
        created=one.created_at / 1e9,
        disk=one.disk_bytes,
        pod=f"{one.pod_namespace}/{one.pod}" if one.pod else "",
        pod_id=one.pod_sandbox_id,
        vm_id=one.container_id,
        saved=SavedMemory(saved.bytes, saved.saved_at / 1e9, saved.lapses_at / 1e9, saved.taken)
        if one.HasField("saved")
        else None,
    )


class OperatorClient:
    """`vm`: the beginning of a container's or a pod's id."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = operator_pb2_grpc.OperatorStub(channel)

    def act(self, action: Action, vm: str, seconds: int = 0) -> tuple[bool, str]:
        """Whether the action changed anything, and a message about it. `seconds`: for FREEZE only."""
        with as_shim_errors():
            if action is Action.FREEZE:
                if not 0 <= seconds < 1 << 32:
                    raise InvalidRequest(f"--seconds {seconds}: must be a number of seconds")
                answer = self._stub.Freeze(operator_pb2.FreezeRequest(id=vm, seconds=seconds), timeout=_ADMIN_SECONDS)
            else:
                call = getattr(self._stub, action.value.capitalize())
                limit = _SAVE_SECONDS if action in (Action.SAVE, Action.RENEW) else _ADMIN_SECONDS
                answer = call(operator_pb2.VmRequest(id=vm), timeout=limit)
        return answer.changed, answer.message

    def save_all(self, seconds: int) -> Mapping[str, str]:
        """Saves the VMs whose stops save. Returns, by NAMESPACE/NAME/CONTAINER, "" or why the guest runs on."""
        if not 1 <= seconds < 1 << 31:
            raise InvalidRequest(f"--seconds {seconds}: must be a number of seconds, at least 1")
        with as_shim_errors():
            limit = seconds + _ADMIN_SECONDS
            answer = self._stub.SaveAll(operator_pb2.SaveAllRequest(seconds=seconds), timeout=limit)
        return {one.vm: one.error for one in answer.results}

    def inspect(self, vm: str) -> dict[str, Any]:
        with as_shim_errors():
            found: dict[str, Any] = json.loads(
                self._stub.Inspect(operator_pb2.InspectRequest(id=vm), timeout=_ADMIN_SECONDS).json
            )
        return found

    def definition(self, vm: str) -> str:
        with as_shim_errors():
            return self._stub.DumpXml(operator_pb2.VmRequest(id=vm), timeout=_ADMIN_SECONDS).xml

    def screenshot(self, vm: str) -> bytes:
        with as_shim_errors():
            return self._stub.Screenshot(operator_pb2.VmRequest(id=vm), timeout=_ADMIN_SECONDS).png

    def screen_url(self, vm: str) -> str:
        with as_shim_errors():
            return self._stub.OpenScreen(operator_pb2.VmRequest(id=vm), timeout=_ADMIN_SECONDS).url

    def pulls(self) -> Sequence[Pulling]:
        with as_shim_errors():
            found = self._stub.Pulls(operator_pb2.PullsRequest(), timeout=_ADMIN_SECONDS).pulls
        return [Pulling(one.image, one.received, one.total) for one in found]

    def lasting_vms(self) -> Sequence[LastingVm]:
        with as_shim_errors():
            found = self._stub.Vms(operator_pb2.VmsRequest(), timeout=_ADMIN_SECONDS).vms
        return [_lasting_vm(one) for one in found]

    def remove_vm(self, vm: LastingVm) -> str:
        """What came of it."""
        request = operator_pb2.RemoveVmRequest(namespace=vm.namespace, name=vm.name, container=vm.container)
        with as_shim_errors():
            return self._stub.RemoveVm(request, timeout=_ADMIN_SECONDS).message

    def start_ups(self, vm: str = "") -> Sequence[operator_pb2.StartUp]:
        """`vm`: "" for all."""
        with as_shim_errors():
            return list(self._stub.StartUps(operator_pb2.StartUpsRequest(id=vm), timeout=_ADMIN_SECONDS).start_ups)

    def actions(self, since: float = 0.0, *, follow: bool = True) -> Iterator[Taken]:
        """The actions after `since`; if `follow`, then each new one when it happens."""
        request = operator_pb2.FollowActionsRequest(since=int(since * 1e9), remembered_only=not follow)
        with as_shim_errors():
            for one in self._stub.FollowActions(request):
                yield Taken(one.at / 1e9, one.action, one.container_id, f"{one.namespace}/{one.pod}", one.message)


@contextlib.contextmanager
def operating(path: str) -> Iterator[OperatorClient]:
    """Yields a client of this admin socket. Raises Unavailable if the socket does not exist, PermissionRefused if this user may
    not use it."""
    if not os.path.exists(path):
        raise Unavailable(
            f"there is no admin socket {path}: is virtshim running? The socket is in paths.run_dir, or beside the socket of "
            "--socket"
        )
    refuse_others_socket(path)
    with open_channel(path) as channel:
        yield OperatorClient(channel)


def refuse_others_socket(path: str) -> None:
    """Raises PermissionRefused if this user may not connect, which needs write permission (unix(7)). gRPC would only say that the
    socket is unreachable."""
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise PermissionRefused(f"this user has no access to {path}; run the command as root, with sudo")


@contextlib.contextmanager
def as_shim_errors() -> Iterator[None]:
    """Turns a call's gRPC error into a ShimError with the kind and message that the node sent."""
    try:
        yield
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or "no reason given"
        if code is grpc.StatusCode.UNAVAILABLE and "connect" in details:
            raise Unavailable(
                f"no answer on the CRI socket ({details}); is virtshim running? It needs root; set another socket by --socket"
            ) from error
        raise _ERRORS[kind_of(code, details)](details) from error
