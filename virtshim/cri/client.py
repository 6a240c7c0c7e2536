"""The client of the CRI socket, for virtshim's command line."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from pydantic import TypeAdapter, ValidationError

from criproto.admin_v1 import admin_pb2, admin_pb2_grpc
from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.annotations.parse import VNC_ANNOTATION
from virtshim.cri.channel import SECONDS, as_shim_errors, ask, open_channel, refuse_others_socket
from virtshim.model.errors import InternalError, NotFound, WrongState
from virtshim.streaming.ports import Streams

# Seconds that the node gives a guest agent to answer.
_AGENT_SECONDS: Final = 30.0
# The node has its own limits for a pull.
_PULL_SECONDS: Final = 24 * 3600.0
_START_SECONDS: Final = 240.0


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
        """The state for people: "paused" for a paused VM, which CRI has no state for, and otherwise `state`."""
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
class NodeEvent:
    """`at`: seconds since 1970. `what`: `pod created`, `vm started`, `pause` and so on. `id`: of the pod or the VM."""

    at: float
    what: str
    id: str
    pod: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class WantedVm:
    """`memory`: bytes. `cpus`: cores. 0 means the node's default. `stays`: its pod notes what is wanted, so that it can be
    started again."""

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
    stays: bool = False


@dataclass(frozen=True, slots=True)
class MadePod:
    """A pod of `virtshim run`. `mark`: that of all pods of the same VM. `wanted`: None if the VM does not stay."""

    id: str
    namespace: str
    name: str
    attempt: int
    is_ready: bool
    mark: str
    wanted: WantedVm | None


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
        items = ask(self._runtime.ListPodSandbox, pb.ListPodSandboxRequest(), adopted=True).items
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
        items = ask(self._runtime.ListContainers, pb.ListContainersRequest()).containers
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
        request = pb.PodSandboxStatusRequest(pod_sandbox_id=pod)
        try:
            network = ask(self._runtime.PodSandboxStatus, request, adopted=True).status.network
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
        return ask(self._runtime.Exec, request).url

    def has_vnc(self, pod: str) -> bool:
        """Whether the pod's port 5900 is its VM's screen."""
        request = pb.PodSandboxStatusRequest(pod_sandbox_id=pod)
        status = ask(self._runtime.PodSandboxStatus, request, adopted=True).status
        return status.annotations.get(VNC_ANNOTATION) == "true"

    def add_ssh_keys(self, vm: str, user: str, keys: Sequence[str]) -> None:
        request = admin_pb2.AddSshKeysRequest(container_id=vm, user=user, keys=keys)
        ask(self._admin.AddSshKeys, request, SECONDS + _AGENT_SECONDS)

    def console_url(self, vm: str, *, stdin: bool) -> str:
        request = admin_pb2.AttachConsoleRequest(container_id=vm, stdin=stdin)
        return ask(self._admin.AttachConsole, request).url

    def images(self) -> Sequence[ImageSummary]:
        found = ask(self._images.ListImages, pb.ListImagesRequest()).images
        return [ImageSummary(i.id, tuple(i.repo_tags), tuple(i.repo_digests), i.size, i.pinned) for i in found]

    def image_id(self, image: str) -> str:
        """The id of the image with that name or id, "" if there is none."""
        request = pb.ImageStatusRequest(image=pb.ImageSpec(image=image))
        return ask(self._images.ImageStatus, request).image.id

    def users_of_images(self) -> Mapping[str, Sequence[str]]:
        """The names of the pods whose containers, ended ones included, use an image, by the image's id."""
        pods = {pod.id: f"{pod.namespace}/{pod.name}" for pod in self.pods()}
        items = ask(self._runtime.ListContainers, pb.ListContainersRequest()).containers
        users: dict[str, list[str]] = {}
        for one in items:
            users.setdefault(one.image_id or one.image_ref, []).append(pods.get(one.pod_sandbox_id, one.pod_sandbox_id))
        return users

    def remove_image(self, image: str) -> None:
        """No error if it is missing."""
        request = pb.RemoveImageRequest(image=pb.ImageSpec(image=image))
        ask(self._images.RemoveImage, request, _START_SECONDS)

    def image_bytes(self) -> int:
        """What all images take on the node's disks."""
        found = ask(self._images.ImageFsInfo, pb.ImageFsInfoRequest()).image_filesystems
        return sum(one.used_bytes.value for one in found)

    def pull(self, image: str, login: tuple[str, str] | None = None) -> Pull:
        auth = pb.AuthConfig(username=login[0], password=login[1]) if login else None
        request = pb.PullImageRequest(image=pb.ImageSpec(image=image), auth=auth)
        return Pull(self._images.PullImage.future(request, timeout=_PULL_SECONDS))

    def usage(self) -> Sequence[PodUsage]:
        request = pb.ListPodSandboxStatsRequest()
        found = ask(self._runtime.ListPodSandboxStats, request, adopted=True).stats
        return [_usage(one) for one in found]

    def events(self) -> Iterator[NodeEvent]:
        with as_shim_errors():
            for one in self._runtime.GetContainerEvents(pb.GetEventsRequest()):
                metadata = one.pod_sandbox_status.metadata
                what = pb.ContainerEventType.Name(one.container_event_type)
                what = what.removeprefix("CONTAINER_").removesuffix("_EVENT").lower()
                subject = "pod" if one.container_id == one.pod_sandbox_status.id else "vm"
                pod = f"{metadata.namespace}/{metadata.name}"
                yield NodeEvent(one.created_at / 1e9, f"{subject} {what}", one.container_id, pod)

    def how_is(self, vm: str) -> Ended:
        request = pb.ContainerStatusRequest(container_id=vm)
        status = ask(self._runtime.ContainerStatus, request).status
        is_over = status.state == pb.CONTAINER_EXITED
        return Ended(is_over, status.exit_code, status.reason, status.message, status.log_path)

    def make_pod(self, wanted: WantedVm, mark: str, attempt: int = 0) -> str:
        """Creates a pod sandbox with the label `mark`, so that `remove_marked` finds it even if this call fails. `attempt`: how
        many pods the same VM had before."""
        request = pb.RunPodSandboxRequest(config=_pod(wanted, mark, attempt), runtime_handler=wanted.handler)
        return ask(self._runtime.RunPodSandbox, request, _START_SECONDS).pod_sandbox_id

    def start_vm(self, pod: str, wanted: WantedVm, mark: str, attempt: int = 0) -> str:
        """Creates and starts a VM. Returns its id; its QEMU runs."""
        request = pb.CreateContainerRequest(
            pod_sandbox_id=pod, config=_container(wanted), sandbox_config=_pod(wanted, mark, attempt)
        )
        made = ask(self._runtime.CreateContainer, request, _START_SECONDS).container_id
        ask(self._runtime.StartContainer, pb.StartContainerRequest(container_id=made), _START_SECONDS)
        return made

    def attach_url(self, vm: str, *, tty: bool) -> str:
        """A URL of the command's input and output."""
        request = pb.AttachRequest(container_id=vm, stdin=True, stdout=True, stderr=not tty, tty=tty)
        return ask(self._runtime.Attach, request).url

    def forward_url(self, pod: str, port: int) -> str:
        """A URL of a connection to the guest's port."""
        request = pb.PortForwardRequest(pod_sandbox_id=pod, port=[port])
        return ask(self._runtime.PortForward, request).url

    def remove_marked(self, mark: str, *, but: str = "") -> None:
        """Removes every pod with that mark, with everything in it. `but`: the id of one that stays."""
        wanted = pb.ListPodSandboxRequest(filter=pb.PodSandboxFilter(label_selector={MARK: mark}))
        found = ask(self._runtime.ListPodSandbox, wanted).items
        for pod in found:
            if pod.id != but:
                self.remove_pod(pod.id)

    def remove_pod(self, pod: str) -> None:
        """No error if it is gone."""
        self.stop_pod(pod)
        ask(self._runtime.RemovePodSandbox, pb.RemovePodSandboxRequest(pod_sandbox_id=pod), _START_SECONDS)

    def stop_pod(self, pod: str) -> None:
        """Ends its VM at once. No error if it is gone."""
        ask(self._runtime.StopPodSandbox, pb.StopPodSandboxRequest(pod_sandbox_id=pod), _START_SECONDS)

    def stop_vm(self, vm: str, seconds: int) -> None:
        """`seconds`: the time that the guest has to shut down."""
        request = pb.StopContainerRequest(container_id=vm, timeout=seconds)
        ask(self._runtime.StopContainer, request, seconds + _START_SECONDS)

    def made_by_run(self) -> Sequence[MadePod]:
        """Newest first. Raises InternalError for a pod whose note of what is wanted cannot be read."""
        items = ask(self._runtime.ListPodSandbox, pb.ListPodSandboxRequest()).items
        newest = sorted(items, key=lambda one: one.created_at, reverse=True)
        return [_made_pod(one) for one in newest if is_made_by_run(one.labels)]


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
# The name of the container in pods of `virtshim run`.
CONTAINER: Final = "vm"
# The annotation that keeps what is wanted of a VM that stays. It is none of virtshim.io/, because pods' authors do not write it.
_WANTED: Final = "run.virtshim.io/wanted"
# A label of kubelet's pods. Their authors choose all others.
_OF_KUBELET: Final = "io.kubernetes.pod.uid"
_wanted_vms: Final = TypeAdapter(WantedVm)


def is_made_by_run(labels: Mapping[str, str]) -> bool:
    """Whether a pod with these labels is one of `virtshim run`."""
    return MARK in labels and _OF_KUBELET not in labels


def _pod(wanted: WantedVm, mark: str, attempt: int = 0) -> pb.PodSandboxConfig:
    """The result is the same for each call with the same mark and attempt."""
    annotations = dict(wanted.annotations or {})
    if wanted.stays:
        annotations[_WANTED] = _wanted_vms.dump_json(wanted).decode()
    uid = str(uuid.uuid5(uuid.NAMESPACE_OID, mark))
    return pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(name=wanted.name, namespace=wanted.namespace, uid=uid, attempt=attempt),
        hostname=wanted.name[:63],
        labels={MARK: mark},
        annotations=annotations,
        linux=pb.LinuxPodSandboxConfig(),
    )


def _made_pod(item: pb.PodSandbox) -> MadePod:
    text = item.annotations.get(_WANTED, "")
    try:
        wanted = _wanted_vms.validate_json(text) if text else None
    except ValidationError as exc:
        raise InternalError(f"annotation {_WANTED} of pod {item.metadata.name} cannot be read: {exc}") from exc
    return MadePod(
        item.id,
        item.metadata.namespace,
        item.metadata.name,
        item.metadata.attempt,
        item.state == pb.SANDBOX_READY,
        item.labels[MARK],
        wanted,
    )


def _container(wanted: WantedVm) -> pb.ContainerConfig:
    resources = pb.LinuxContainerResources(memory_limit_in_bytes=wanted.memory)
    if wanted.cpus:
        resources.cpu_period, resources.cpu_quota = 100_000, int(100_000 * wanted.cpus)
    return pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name=CONTAINER, attempt=0),
        image=pb.ImageSpec(image=wanted.image),
        command=wanted.command,
        envs=[pb.KeyValue(key=key, value=value.encode()) for key, value in wanted.env],
        stdin=not (wanted.stays and wanted.command),
        stdin_once=bool(wanted.command)
        and not (wanted.tty or wanted.stays),  # a command that reads a pipe has to see its end
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


# The pods that `virtshim run` made for one VM, and the VM's stop: for the command line and the dashboard.


def pods_of(node: NodeClient, name: str) -> Sequence[MadePod]:
    """The pods of a VM, newest first. `name`: the VM's name, namespace/name, or the id of one of its pods. Raises NotFound, and
    WrongState for a pod that kubelet made."""
    made = node.made_by_run()
    newest = next((pod for pod in made if name in (pod.name, f"{pod.namespace}/{pod.name}", pod.id)), None)
    if newest is not None:
        return [pod for pod in made if pod.mark == newest.mark]
    if any(name in (pod.name, f"{pod.namespace}/{pod.name}", pod.id) for pod in node.pods()):
        raise WrongState(
            f"pod {name} was not made by `virtshim run`; kubectl starts, stops and removes pods of Kubernetes"
        )
    raise NotFound(f"no VM {name!r} was made by `virtshim run -d`; `virtshim ps` lists the VMs of this node")


def running_vm_of(node: NodeClient, pods: Sequence[MadePod]) -> VmSummary | None:
    ids = {pod.id for pod in pods}
    return next((vm for vm in node.vms() if vm.pod in ids and vm.state == "running"), None)


def stop_vm_of_run(node: NodeClient, name: str, seconds: int) -> None:
    """Shuts the guest down, within `seconds`. `name`: as for `pods_of`. No error if it has ended."""
    pods = pods_of(node, name)
    if (vm := running_vm_of(node, pods)) is not None:
        node.stop_vm(vm.id, seconds)
    for pod in pods:
        node.stop_pod(pod.id)
