"""The admin socket: its service, its threads and its permissions."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import grpc
import structlog
from google.protobuf.message import DecodeError

from criproto.operator_v1 import operator_pb2 as pb
from criproto.operator_v1 import operator_pb2_grpc
from criproto.runtime_v1 import api_pb2
from virtshim.containers.operate import ActionLog, VmActions
from virtshim.cri import to_domain
from virtshim.cri.interceptors import CallInterceptor
from virtshim.cri.services import seconds_left, set_when_cancelled
from virtshim.guest.operation import ActionTaken, Outcome
from virtshim.images.ports import SentDisk
from virtshim.images.service import ImageService
from virtshim.metrics.start_ups import StartUp, StartUps
from virtshim.model.container import Container
from virtshim.model.deadline import Deadline
from virtshim.model.errors import DeadlineExceeded, InvalidRequest, NotFound, WrongState
from virtshim.model.ids import SandboxId
from virtshim.model.sandbox import Adoption, Sandbox
from virtshim.moves.keeping import KnownVm, LastingVms
from virtshim.moves.receiving import ReceiveVm
from virtshim.pods.adopt_sandbox import AdoptSandbox
from virtshim.pods.inspection import Inspection
from virtshim.pods.lookup import existing_sandbox, find_container, find_sandbox, require_running
from virtshim.store.ports import Records
from virtshim.streaming.ports import VNC_PORT, ForwardRequest, Streaming
from virtshim.system.clock import Clock
from virtshim.system.grpc_socket import listen
from virtshim.system.threads import Workers
from virtshim.vm.ports import Screenshots, VmControl

# Seconds for QEMU to deliver a screenshot.
_SCREENSHOT: Final = 15.0
_NO_SCREEN: Final = (
    "the VM of container {0} has no video card: its pod was created without the annotation virtshim.io/vnc. Recreate the pod "
    'with `virtshim.io/vnc: "true"`, or use the console (`virtshim console`)'
)


@dataclass(frozen=True, slots=True)
class OperatorServices:
    """The use cases that the calls need."""

    records: Records
    clock: Clock
    actions: VmActions
    action_log: ActionLog
    control: VmControl
    screenshots: Screenshots
    has_screen: Callable[[Container], bool]
    streaming: Streaming
    images: ImageService
    inspection: Inspection
    start_ups: StartUps
    vms: LastingVms
    receiving: ReceiveVm
    adopt_sandbox: AdoptSandbox


class OperatorServicer(operator_pb2_grpc.OperatorServicer):
    """Each call converts the request, calls one use case and converts the answer."""

    def __init__(self, services: OperatorServices) -> None:
        self.services = services

    # --- reading

    def StartUps(self, request: pb.StartUpsRequest, context: grpc.ServicerContext) -> pb.StartUpsResponse:
        found = (
            [self.services.start_ups.start_up(self._pod(request.id)[0].id)]
            if request.id
            else self.services.start_ups.all()
        )
        now = self.services.clock.monotonic()
        return pb.StartUpsResponse(start_ups=[_start_up(one, now) for one in found])

    def Pulls(self, request: pb.PullsRequest, context: grpc.ServicerContext) -> pb.PullsResponse:
        return pb.PullsResponse(
            pulls=[
                pb.Pull(image=one.image, received=one.received, total=one.total, began_at=one.began_at)
                for one in self.services.images.files.under_way()
            ]
        )

    def Inspect(self, request: pb.InspectRequest, context: grpc.ServicerContext) -> pb.InspectResponse:
        sandbox, container = self._pod(request.id)
        facts = self.services.inspection.facts(sandbox, container, self.services.clock.monotonic())
        return pb.InspectResponse(json=json.dumps(facts))

    def FollowActions(self, request: pb.FollowActionsRequest, context: grpc.ServicerContext) -> Iterator[pb.Action]:
        """The initial metadata says that the client misses nothing from now on."""
        since = request.since or self.services.clock.now_ns()
        if request.remembered_only:
            yield from map(_action, self.services.action_log.since(since))
            return
        left = threading.Event()

        def leave() -> None:
            left.set()
            self.services.action_log.wake()

        if not context.add_callback(leave):
            return  # the client has disconnected
        context.send_initial_metadata(())
        yield from map(_action, self.services.action_log.follow(since, left))

    def DumpXml(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.DumpXmlResponse:
        return pb.DumpXmlResponse(xml=self.services.control.definition(self._vm(request.id).domain_uuid))

    def Screenshot(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ScreenshotResponse:
        container = self._with_screen(request.id)
        return pb.ScreenshotResponse(png=self.services.screenshots.take(container.id, _SCREENSHOT))

    def OpenScreen(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.OpenScreenResponse:
        """Works without the pod author's consent, because the caller is root on the node. The annotation only gives the VM its
        video card, and admits users who may forward the pod's ports."""
        container = self._with_screen(request.id)
        sandbox = existing_sandbox(self.services.records, container.sandbox_id)
        address = sandbox.network.ips[0] if sandbox.network and sandbox.network.ips else ""
        wanted = ForwardRequest(sandbox.id, address, (VNC_PORT,), screen=container.id, pod=sandbox.key.readable)
        return pb.OpenScreenResponse(url=self.services.streaming.offer(wanted))

    def Vms(self, request: pb.VmsRequest, context: grpc.ServicerContext) -> pb.VmsResponse:
        return pb.VmsResponse(vms=map(_lasting_vm, self.services.vms.all()))

    def end_streams(self) -> None:
        """Ends all streams, because the server stops and they never end by themselves."""
        self.services.action_log.close()

    # --- acting

    def Pause(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        return _outcome(self.services.actions.pause(self._vm(request.id)))

    def Resume(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        return _outcome(self.services.actions.resume(self._vm(request.id)))

    def Reset(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        return _outcome(self.services.actions.reset(self._vm(request.id)))

    def Reboot(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        return _outcome(self.services.actions.reboot(self._vm(request.id)))

    def Freeze(self, request: pb.FreezeRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        return _outcome(self.services.actions.freeze(self._vm(request.id), request.seconds))

    def Thaw(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        return _outcome(self.services.actions.thaw(self._vm(request.id)))

    def Save(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        return _outcome(self.services.actions.save(self._vm(request.id)))

    def SaveAll(self, request: pb.SaveAllRequest, context: grpc.ServicerContext) -> pb.SaveAllResponse:
        if not request.seconds:
            raise InvalidRequest("seconds: must be at least 1")
        done = self.services.actions.save_all(request.seconds)
        results = [pb.SaveResult(container_id=one.id.value, vm=self._vm_name(one), error=error) for one, error in done]
        return pb.SaveAllResponse(results=results)

    def Renew(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        return _outcome(self.services.actions.renew(self._vm(request.id)))

    def LoadImage(self, requests: Iterator[pb.LoadImageRequest], context: grpc.ServicerContext) -> pb.LoadImageResponse:
        first = next(requests, pb.LoadImageRequest())
        sent = SentDisk(max(0, first.total), _sent(itertools.chain((first,), requests)))
        image = self.services.images.load(first.name, sent, set_when_cancelled(context))
        return pb.LoadImageResponse(id=image.id.value)

    def RemoveVm(self, request: pb.RemoveVmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        return _outcome(self.services.vms.remove(request.namespace, request.name, request.container))

    def TakeVm(self, request: pb.TakeVmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        return _outcome(self.services.receiving.take(request.namespace, request.name, request.container))

    def Adopt(self, request: pb.AdoptRequest, context: grpc.ServicerContext) -> pb.AdoptResponse:
        if bool(request.sandbox_id) != bool(request.netns):
            raise InvalidRequest(
                "Adopt: sandbox_id and netns belong together; send both, or neither to check the pod only"
            )
        asked = _pod_config(request.config)
        key, config = to_domain.sandbox_key(asked), to_domain.sandbox_config(asked, request.runtime_handler)
        deadline = Deadline.after(self.services.clock.monotonic(), seconds_left(context))
        if request.sandbox_id:
            to = Adoption(request.netns, tuple(request.addresses))
            self.services.adopt_sandbox.adopt(SandboxId(request.sandbox_id), key, config, to, deadline)
        else:
            self.services.adopt_sandbox.check(config, deadline)
        return pb.AdoptResponse()

    # --- finding the VM

    def _vm_name(self, container: Container) -> str:
        sandbox = self.services.records.sandboxes.get(container.sandbox_id)
        return "/".join((sandbox.key.namespace if sandbox else "", container.spec.vm, container.name.name))

    def _pod(self, text: str) -> tuple[Sandbox, Container | None]:
        """The pod, and its container: the named one, or else the running one, or else the newest."""
        container = find_container(self.services.records, text)
        if container is not None:
            return existing_sandbox(self.services.records, container.sandbox_id), container
        sandbox = find_sandbox(self.services.records, text, adopted=True)
        if sandbox is None:
            raise NotFound(f"no such container or pod sandbox: {text[:80]!r}; `virtshim ps` lists them")
        own = [one for one in self.services.records.containers.all() if one.sandbox_id == sandbox.id and one.is_visible]
        running = [one for one in own if one.is_running]
        found = running or own
        return sandbox, found[-1] if found else None

    def _vm(self, text: str) -> Container:
        sandbox, container = self._pod(text)
        if container is None:
            raise WrongState(f"pod {sandbox.key.readable} has no VM")
        return container

    def _with_screen(self, text: str) -> Container:
        container = self._vm(text)
        require_running(container)
        if not self.services.has_screen(container):
            raise WrongState(_NO_SCREEN.format(container.id.short))
        return container


def _pod_config(sent: bytes) -> api_pb2.PodSandboxConfig:
    """Without what the runtime that made the sandbox applies to its own containers, and checks itself."""
    try:
        config = api_pb2.PodSandboxConfig.FromString(sent)
    except DecodeError as exc:
        raise InvalidRequest(f"Adopt: config is not a runtime.v1.PodSandboxConfig: {exc}") from exc
    for field in ("seccomp", "seccomp_profile_path", "apparmor", "run_as_group"):
        config.linux.security_context.ClearField(field)
    return config


def _start_up(found: StartUp, now: float) -> pb.StartUp:
    return pb.StartUp(
        pod_sandbox_id=found.sandbox.value,
        phases=[
            pb.Phase(
                name=phase.name,
                container_id=phase.container.value if phase.container else "",
                began_at=phase.began_at,
                duration=int(phase.lasted(now) * 1e9),
                is_over=phase.seconds is not None,
                error=phase.error,
            )
            for phase in found.phases
        ],
    )


def _action(taken: ActionTaken) -> pb.Action:
    return pb.Action(
        at=taken.at,
        action=taken.action.value,
        container_id=taken.container.value,
        pod_sandbox_id=taken.sandbox.value,
        namespace=taken.namespace,
        pod=taken.pod,
        message=taken.message,
    )


def _lasting_vm(known: KnownVm) -> pb.LastingVm:
    vm, user, pod = known.record, known.container, known.pod
    made = pb.LastingVm(
        namespace=vm.namespace,
        name=vm.name,
        container=vm.container,
        created_at=vm.created_at,
        disk_bytes=known.disk_bytes,
        container_id=user.id.value if user else "",
        pod_sandbox_id=user.sandbox_id.value if user else "",
        pod_namespace=pod.key.namespace if pod else "",
        pod=pod.key.name if pod else "",
    )
    if vm.departure is not None:
        made.moved_to = vm.departure.node
    if vm.arrival is not None:
        made.comes_from, made.undecided = vm.arrival.node, vm.arrival.state is not None
    if vm.saved is not None:
        made.saved.bytes, made.saved.saved_at = vm.saved.bytes, vm.saved.saved_at
        made.saved.lapses_at, made.saved.taken = known.lapses_at, vm.saved.taken_by is not None
    return made


def _sent(requests: Iterator[pb.LoadImageRequest]) -> Iterator[bytes]:
    try:
        for request in requests:
            if request.data:
                yield request.data
            if request.is_last:
                return
    except grpc.RpcError as exc:  # the client has disconnected
        raise DeadlineExceeded("the disk was not stored: its client ended the call") from exc
    raise InvalidRequest("the disk was not stored: the stream ended before its last message; send the disk again")


def _outcome(found: Outcome) -> pb.ActionResponse:
    return pb.ActionResponse(changed=found.changed, message=found.message)


log = structlog.get_logger(__name__)

# A screenshot of a large screen is some MiB.
_MESSAGE_BYTES: Final = 64 << 20
_CALLS: Final = 32


class OperatorServer:
    """Serves a socket of its own beside the CRI socket, because users of CRI, such as kubelet, need not be able to reset VMs. The
    socket has mode 0600 from the start, so only root can connect."""

    def __init__(self, path: str, servicer: OperatorServicer) -> None:
        self._path = path
        self._servicer = servicer
        self._pool = Workers(_CALLS, "operator")
        self._server = grpc.server(
            self._pool,
            interceptors=[CallInterceptor(self._pool)],
            options=(("grpc.max_send_message_length", _MESSAGE_BYTES), ("grpc.so_reuseport", 0)),
        )
        operator_pb2_grpc.add_OperatorServicer_to_server(servicer, self._server)

    def start(self) -> None:
        """Raises WrongState if the socket cannot be served."""
        listen(self._server, self._path)
        self._server.start()
        log.info("admin.serving", socket=self._path)

    def stop(self, grace: float) -> None:
        """Refuses new calls and ends streams at once; other running calls get `grace` seconds."""
        stopped = self._server.stop(grace)
        self._servicer.end_streams()
        stopped.wait()
        self._pool.shutdown(wait=False, cancel_futures=True)
