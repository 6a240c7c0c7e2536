"""Pods that the primary makes, with its ordinary containers, and whose VM another runtime runs: this node's virtshim.

The primary owns the sandbox. virtshim adopts it when the VM's container is created, shows no sandbox of its own, and lists its
container with the primary's sandbox id. So most calls go where they go without these pods. This module has the others: calls for
both runtimes, and the primary's answers that are complete only with the VM's container.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import grpc
import structlog
from grpc import aio

from criproto.operator_v1 import operator_pb2 as operator
from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import InvalidRequest, ShimError, Unimplemented, WrongState
from virtshim.proxy.backend import Answer, Asked, Backend, CallFailed, Patience
from virtshim.proxy.last_known import LastKnown
from virtshim.proxy.routes import Routes
from virtshim.proxy.wire import (
    CONTAINER_STATUS,
    LIST_CONTAINER_STATS,
    LIST_CONTAINERS,
    POD_STATUS,
    VERSION,
    field_number,
    message,
    payloads,
    text,
    text_map,
)

if TYPE_CHECKING:
    # Generic only in the stubs.
    _UnaryUnary = aio.UnaryUnaryMultiCallable[bytes, bytes]

log = structlog.get_logger(__name__)

T = TypeVar("T")

# The stats of VMs' containers, by the id of the sandbox.
VmStats = Mapping[str, Sequence[pb.ContainerStats]]

# The annotation that names the VM's container, if its image has no prefix.
VM_CONTAINER: Final = "virtshim.io/vm-container"

_CONFIG: Final = field_number(pb.CreateContainerRequest, "config")
_SANDBOX: Final = field_number(pb.CreateContainerRequest, "sandbox_config")
_ANNOTATIONS: Final = field_number(pb.PodSandboxConfig, "annotations")
_METADATA: Final = field_number(pb.ContainerConfig, "metadata")
_NAME: Final = field_number(pb.ContainerMetadata, "name")
_IMAGE: Final = field_number(pb.ContainerConfig, "image")
_MOUNTS: Final = field_number(pb.ContainerConfig, "mounts")
_MOUNT_IMAGE: Final = field_number(pb.Mount, "image")
_IMAGE_NAMES: Final = tuple(field_number(pb.ImageSpec, name) for name in ("user_specified_image", "image"))
_EVENTS_POD: Final = field_number(pb.ContainerEventResponse, "pod_sandbox_status")
_POD_ID: Final = field_number(pb.PodSandboxStatus, "id")
_POD_HANDLER: Final = field_number(pb.PodSandboxStatus, "runtime_handler")
_STATUS: Final = field_number(pb.ContainerStatusResponse, "status")

_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1),)
_ADOPT: Final = "/virtshim.operator.v1.Operator/Adopt"


class Adopter:
    """virtshim's call by which it takes over the VM of another runtime's sandbox."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    async def adopt(self, request: operator.AdoptRequest, seconds: float | None) -> None:
        """Connects each time: a connection that was lost would fail calls for a while after virtshim is back. Raises CallFailed,
        WrongState."""
        try:
            async with aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS) as channel:
                call: _UnaryUnary = channel.unary_unary(_ADOPT)
                await call(request.SerializeToString(), timeout=seconds)
        except aio.AioRpcError as exc:
            if exc.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise WrongState(
                    f"virtshim at {self._socket} is older than this proxy and cannot run a VM beside containers; restart "
                    "virtshim, so that its new version runs"
                ) from None
            details = exc.details() or ""
            if exc.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                details = f"virtshim at {self._socket} does not adopt the pod: {details}"
            raise CallFailed(exc.code(), details) from None


class SharedPods:
    def __init__(
        self, routes: Routes, backends: Sequence[Backend], adopter: Adopter, last_known: LastKnown, patience: float
    ) -> None:
        """`routes` has a runtime with pod handlers."""
        self._routes = routes
        self._primary = backends[0]
        self.vms = next(one for one in backends if one.runtime is routes.vms)
        self._adopter = adopter
        self._last_known = last_known
        self._patience = patience

    # --- calls

    async def check(self, config: bytes, handler: str, asked: Asked) -> None:
        """Refuses a pod that cannot have a VM, before the primary makes it. Raises CallFailed: UNAVAILABLE if virtshim is
        down."""
        self.vms.refuse_if_down()
        request = operator.AdoptRequest(config=config, runtime_handler=handler)
        patience = Patience.within(self._patience, asked.remaining)
        try:
            await self._adopter.adopt(request, patience.seconds)
        except CallFailed as failed:
            if failed.code is grpc.StatusCode.DEADLINE_EXCEEDED and patience.is_full:
                raise self.vms.silent(patience.seconds) from None
            raise

    async def both(self, asked: Asked, *, unknown_is_fine: bool = False) -> Answer:
        """Makes the call at virtshim, and then at the primary, whose answer counts. `unknown_is_fine`: virtshim knows only pods
        whose VM has been created. Raises CallFailed."""
        try:
            await self._while_alive(self.vms.pass_on(asked), asked)
        except CallFailed as failed:
            if not unknown_is_fine or failed.code is not grpc.StatusCode.NOT_FOUND:
                raise
        return await self._primary.pass_on(asked)

    def is_of_vm(self, request: bytes) -> bool:
        """Whether this CreateContainerRequest is for the pod's VM. Raises InvalidRequest."""
        config = message(request, _CONFIG)
        wanted = text_map(message(request, _SANDBOX), _ANNOTATIONS).get(VM_CONTAINER)
        if wanted and wanted == text(message(config, _METADATA), _NAME):
            return True
        return self._routes.for_image_of(self.vms.runtime, image_of(request)) is self.vms.runtime

    async def adopt_later_sandbox(self, pod: str, config: bytes, asked: Asked) -> None:
        """Has virtshim adopt a sandbox that is not the pod's first one as soon as it is made. virtshim keeps the pod's root disk
        while it knows a sandbox of the pod, and kubelet may remove the earlier one before it creates the VM's container."""
        if pb.PodSandboxConfig.FromString(config).metadata.attempt == 0:
            return
        try:
            await self._adopt(pod, config, asked)
        except (CallFailed, ShimError) as failed:  # CreateContainer adopts it otherwise
            log.warning("proxy.pod.not-adopted", pod=pod, error=str(failed))

    async def create_vm(self, pod: str, asked: Asked) -> Answer:
        """Has virtshim adopt the pod's sandbox, and then create the container. Raises CallFailed, WrongState."""
        self.vms.refuse_if_down()
        await self._adopt(pod, message(asked.request, _SANDBOX), asked)
        return await self._while_alive(self.vms.pass_on(asked), asked)

    async def _adopt(self, pod: str, config: bytes, asked: Asked) -> None:
        """Raises CallFailed, WrongState."""
        question = pb.PodSandboxStatusRequest(pod_sandbox_id=pod, verbose=True).SerializeToString()
        told = await self._primary.call(POD_STATUS, question, asked.remaining)
        answer = pb.PodSandboxStatusResponse.FromString(told.body)
        if answer.status.state != pb.SANDBOX_READY:
            raise WrongState(f"the pod sandbox {pod} is not ready, so no VM can join it; kubelet makes a new sandbox")
        if not self._routes.vms_of(answer.status.runtime_handler):
            # Then a restarted proxy would take the pod for one without a VM.
            raise WrongState(
                f"{self._primary.name} does not say that the pod sandbox {pod} has a handler of virtshim's (runtime_handler is "
                f"{answer.status.runtime_handler[:80]!r}), so a VM cannot join it; containerd says so, CRI-O does not yet"
            )
        network = answer.status.network
        request = operator.AdoptRequest(
            sandbox_id=pod,
            config=config,
            runtime_handler=answer.status.runtime_handler,
            netns=self._netns(pod, answer.info),
            addresses=[one for one in (network.ip, *(more.ip for more in network.additional_ips)) if one],
        )
        await self._while_alive(self._adopter.adopt(request, asked.remaining), asked)

    def refuse_target(self, container: str) -> NoReturn:
        raise InvalidRequest(
            f"the target container {container} of this ephemeral container is the pod's VM, whose processes run in the guest and "
            "cannot be shared; leave --target out, or use kubectl exec to run a command in the guest"
        )

    def refuse_checkpoint(self, name: str) -> NoReturn:
        raise Unimplemented(
            f"{name}: a pod with a VM beside its containers cannot be checkpointed or restored as a whole"
        )

    async def _while_alive(self, call: Coroutine[Any, Any, T], asked: Asked) -> T:
        """Awaits this call at virtshim, which may take long. If virtshim meanwhile does not even answer a Version, it hangs: then
        raises CallFailed (UNAVAILABLE), because the caller's own time may be minutes."""
        pause = Patience.within(self._patience, None if asked.remaining is None else asked.remaining / 2)
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait((task,), timeout=pause.seconds))[0]:
                try:
                    await self.vms.ask(VERSION, b"", pause)
                except CallFailed as failed:
                    if failed.is_down:
                        raise
            return task.result()
        finally:
            task.cancel()

    def _netns(self, pod: str, info: Mapping[str, str]) -> str:
        """The path of the sandbox's network namespace, from the primary's verbose status. Raises WrongState."""
        try:
            told: Any = json.loads(info.get("info", "{}"))
        except ValueError:
            told = {}
        if not isinstance(told, dict):
            told = {}
        if told.get("netNamespaceClosed") is True:
            raise WrongState(f"the network namespace of the pod sandbox {pod} is closed; kubelet makes a new sandbox")
        for name in ("runtimeSpec", "linux", "namespaces"):
            told = told.get(name) if isinstance(told, dict) else None
        for one in told if isinstance(told, list) else ():
            if isinstance(one, dict) and one.get("type") == "network" and one.get("path"):
                return str(one["path"])
        raise WrongState(
            f"{self._primary.name} names no network namespace of its own for the pod sandbox {pod}, so a VM cannot join the pod: "
            f"pods with a VM cannot use the host's network, and {self._primary.name} must tell its runtimeSpec in the verbose "
            "PodSandboxStatus, as containerd and CRI-O do"
        )

    # --- the primary's answers, completed with the VM's container

    async def pod_status(self, pod: str, asked: Asked) -> Answer:
        """kubelet takes a pod's containers from this answer if it has a timestamp (Evented PLEG), and from lists otherwise.
        virtshim is asked after the primary, so that virtshim's answer is not older than the timestamp. Raises CallFailed."""
        answer = await self._primary.pass_on(asked)
        told = pb.PodSandboxStatusResponse.FromString(answer.body)
        if not told.timestamp and not told.containers_statuses:
            return answer
        more = pb.PodSandboxStatusResponse(containers_statuses=await self._statuses(self.vms, pod, asked.remaining))
        return Answer(answer.body + more.SerializeToString(), answer.initial, answer.trailing)

    async def pod_stats(self, pod: str, asked: Asked) -> Answer:
        """Raises CallFailed."""
        answer = await self._primary.pass_on(asked)
        question = pb.ListContainerStatsRequest(filter=pb.ContainerStatsFilter(pod_sandbox_id=pod))
        told = await self._ask(self.vms, LIST_CONTAINER_STATS, question.SerializeToString(), asked.remaining)
        stats = pb.ListContainerStatsResponse.FromString(told).stats
        # Joining the bytes of two messages merges them.
        more = pb.PodSandboxStatsResponse(stats=_with(stats)) if stats else pb.PodSandboxStatsResponse()
        return Answer(answer.body + more.SerializeToString(), answer.initial, answer.trailing)

    async def vm_stats(self, remaining: float | None) -> VmStats:
        """Those of all VMs. Raises CallFailed."""
        listed = pb.ListContainersResponse.FromString(await self._ask(self.vms, LIST_CONTAINERS, b"", remaining))
        pods = {one.id: one.pod_sandbox_id for one in listed.containers}
        told = await self._ask(self.vms, LIST_CONTAINER_STATS, b"", remaining)
        found: dict[str, list[pb.ContainerStats]] = defaultdict(list)
        for one in pb.ListContainerStatsResponse.FromString(told).stats:
            if pod := pods.get(one.attributes.id):
                found[pod].append(one)
        return found

    async def event(self, teller: Backend, event: bytes) -> bytes | None:
        """A container event as kubelet may have it: it takes the pod's sandbox and all its containers from it. None if the other
        runtime does not tell its part: without the VM's container kubelet would start the VM a second time, and its next relist
        finds what the event was about."""
        status = message(event, _EVENTS_POD)
        if teller not in (self._primary, self.vms) or not self._routes.vms_of(text(status, _POD_HANDLER)):
            return event
        pod = text(status, _POD_ID)
        try:
            if teller is self._primary:
                return event + _as_event(await self._statuses(self.vms, pod, None))
            return await self._of_primarys_pod(pod, event)
        except CallFailed as failed:
            log.warning("proxy.event.not-passed-on", runtime=teller.name, pod=pod, error=failed.details)
            return None

    async def _of_primarys_pod(self, pod: str, event: bytes) -> bytes:
        """virtshim's event about the VM, with the primary's sandbox and containers. Without the sandbox if that has been
        removed: kubelet then ignores the event. Raises CallFailed."""
        told = pb.ContainerEventResponse.FromString(event)
        told.ClearField("pod_sandbox_status")
        question = pb.PodSandboxStatusRequest(pod_sandbox_id=pod).SerializeToString()
        with _missing_is_fine():
            answer = await self._ask(self._primary, POD_STATUS, question, None)
            told.pod_sandbox_status.CopyFrom(pb.PodSandboxStatusResponse.FromString(answer).status)
        return told.SerializeToString() + _as_event(await self._statuses(self._primary, pod, None))

    async def _statuses(self, backend: Backend, pod: str, remaining: float | None) -> list[pb.ContainerStatus]:
        """Of this runtime's containers in the pod. Raises CallFailed."""
        question = pb.ListContainersRequest(filter=pb.ContainerFilter(pod_sandbox_id=pod)).SerializeToString()
        listed = await self._ask(backend, LIST_CONTAINERS, question, remaining)
        found = []
        for one in pb.ListContainersResponse.FromString(listed).containers:
            asked = pb.ContainerStatusRequest(container_id=one.id).SerializeToString()
            with _missing_is_fine():  # it was removed meanwhile
                answer = await self._ask(backend, CONTAINER_STATUS, asked, remaining, container=one.id)
                found.append(pb.ContainerStatus.FromString(message(answer, _STATUS)))
        return found

    async def _ask(
        self, backend: Backend, method: str, request: bytes, remaining: float | None, *, container: str = ""
    ) -> bytes:
        """The runtime's answer, or what it last said if it is down and lists then have that, too. Raises CallFailed."""
        try:
            answer = await backend.ask(method, request, Patience.within(self._patience, remaining))
        except CallFailed as failed:
            if not failed.is_down or not self._last_known.stands_in(backend.name):
                raise
            if method != CONTAINER_STATUS:
                return self._last_known.answer(backend.name, method, request)
            if (last := self._last_known.status(backend.name, container)) is None:
                raise
            return last
        if method == CONTAINER_STATUS:
            self._last_known.keep_status(backend.name, answer)
        return answer


def image_of(request: bytes) -> str:
    """The image's name in a CreateContainerRequest, as the pod's author wrote it."""
    return _name_in(message(message(request, _CONFIG), _IMAGE))


def _name_in(image: bytes) -> str:
    return next(filter(None, (text(image, number) for number in _IMAGE_NAMES)), "")


def volume_images_of(request: bytes) -> list[str]:
    """The names of the images that a CreateContainerRequest mounts, as the pod's author wrote them."""
    mounts = (content for number, content in payloads(message(request, _CONFIG)) if number == _MOUNTS)
    images = (message(mount, _MOUNT_IMAGE) for mount in mounts)
    return [name for one in images if (name := _name_in(one))]


def with_vms(
    answer: bytes, kind: type[pb.ListPodSandboxStatsResponse | pb.StreamPodSandboxStatsResponse], stats: VmStats
) -> bytes:
    """The primary's list of pods' stats with the stats of the VMs' containers."""
    listed = kind.FromString(answer)
    pods = listed.stats if isinstance(listed, pb.ListPodSandboxStatsResponse) else listed.pod_sandbox_stats
    found = [one for one in pods if one.attributes.id in stats]
    for one in found:
        one.MergeFrom(_with(stats[one.attributes.id]))
    return listed.SerializeToString() if found else answer


def _with(containers: Sequence[pb.ContainerStats]) -> pb.PodSandboxStats:
    return pb.PodSandboxStats(linux=pb.LinuxPodSandboxStats(containers=containers))


def _as_event(statuses: Sequence[pb.ContainerStatus]) -> bytes:
    return pb.ContainerEventResponse(containers_statuses=statuses).SerializeToString()


@contextlib.contextmanager
def _missing_is_fine() -> Any:
    try:
        yield
    except CallFailed as failed:
        if failed.code is not grpc.StatusCode.NOT_FOUND:
            raise
