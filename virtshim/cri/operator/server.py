"""The admin socket: what it serves, on which threads, and for whom."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc
import structlog

from criproto.operator_v1 import operator_pb2 as pb
from criproto.operator_v1 import operator_pb2_grpc
from virtshim.containers.operate import ActionLog, VmActions
from virtshim.cri.interceptors import CallInterceptor
from virtshim.guest.operation import ActionTaken, Outcome
from virtshim.images.ports import ImageFiles
from virtshim.metrics.start_ups import StartUp, StartUps
from virtshim.model.container import Container
from virtshim.model.errors import NotFound, WrongState
from virtshim.model.sandbox import Sandbox
from virtshim.pods.inspection import Inspection
from virtshim.pods.lookup import existing_sandbox, find_container, find_sandbox, require_running
from virtshim.store.ports import Records
from virtshim.streaming.ports import VNC_PORT, ForwardRequest, Streaming
from virtshim.system.clock import Clock
from virtshim.system.grpc_socket import listen
from virtshim.system.threads import Workers, lasting
from virtshim.vm.ports import Screenshots, VmControl

# The door of the admin socket: who is not root is turned away before a byte of theirs is read.
#
# The socket is root's and 0600, so that the kernel turns others away already. That holds as long as nobody changes
# the mode, and not for programs that may pass by modes; so each connection's own credentials (SO_PEERCRED) count.
# gRPC does not tell them, so it serves a socket behind this one, in a directory that root alone may enter, and the
# bytes are passed on.

log = structlog.get_logger(__name__)

# The pid, uid and gid of a peer, unix(7).
_CREDENTIALS: Final = struct.Struct("iII")
_READ: Final = 64 << 10
# Connections at once. Each is some command of an operator's.
_MOST: Final = 64


class RootGate:
    """`allowed`: the only user that is let in. `again`: seconds before it is tried again when nobody can be let in, such as
    without a free descriptor."""

    def __init__(self, path: str, behind: str, allowed: int = 0, again: float = 0.1) -> None:
        self._again = again
        self._path = path
        self._behind = behind
        self._allowed = allowed
        self._places = threading.BoundedSemaphore(_MOST)
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self) -> None:
        """Raises WrongState if the socket cannot be made."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self._path).st_mode):
                raise WrongState(f"{self._path} is there and is not a socket; move it away")
            os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = os.umask(0o177)
        try:
            listener.bind(self._path)
            listener.listen(16)
        except OSError as exc:
            listener.close()
            raise WrongState(f"cannot listen on {self._path}: {exc.strerror}") from exc
        finally:
            os.umask(before)
        self._listener = listener
        self._thread = lasting(partial(self._accept, listener), "admin-gate")

    def stop(self) -> None:
        """Nobody is let in any more; connections end with the server behind."""
        if self._listener is None or self._thread is None:
            return
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._thread.join()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _accept(self, listener: socket.socket) -> None:
        """Until it is stopped, whatever fails on the way: without this thread no operator gets in any more."""
        fails = False
        while not self._stopping.is_set():
            try:
                self._let_in(listener.accept()[0])
                fails = False
            except (OSError, RuntimeError) as exc:  # no descriptor, a caller that has gone again, no thread
                if self._stopping.is_set():
                    return
                if not fails:
                    log.warning("admin.not_let_in", error=str(exc))
                fails = True
                self._stopping.wait(self._again)

    def _let_in(self, caller: socket.socket) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(caller.close)
            pid, uid, _ = _CREDENTIALS.unpack(
                caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid != self._allowed:
                log.warning("security.admin_refused", pid=pid, uid=uid)
                return
            if not self._places.acquire(blocking=False):
                log.warning("admin.crowded", connections=_MOST)
                return
            undo.callback(self._places.release)
            threading.Thread(target=self._serve, args=(caller,), name="admin-caller", daemon=True).start()
            undo.pop_all()

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as server:
                server.connect(self._behind)
                back = threading.Thread(target=_pass_on, args=(server, caller), name="admin-answers", daemon=True)
                back.start()
                _pass_on(caller, server)
                back.join()
        except (OSError, RuntimeError) as exc:  # also: no thread for the answers
            log.info("admin.broken_off", error=str(exc))
        finally:
            self._places.release()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Until one side ends; then both do."""
    with contextlib.suppress(OSError):
        while data := source.recv(_READ):
            target.sendall(data)
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)


# The service behind the admin socket: convert, ask one use case, convert.

# Seconds for a QEMU to show its screen.
_SCREENSHOT: Final = 15.0
_NO_SCREEN: Final = (
    "the VM of container {0} has no video card: its pod was made without the annotation virtshim.io/vnc. Make it anew with "
    '`virtshim.io/vnc: "true"`; its console is there in any case (`virtshim console`)'
)


@dataclass(frozen=True, slots=True)
class OperatorServices:
    """What the calls are handed to."""

    records: Records
    clock: Clock
    actions: VmActions
    action_log: ActionLog
    control: VmControl
    screenshots: Screenshots
    has_screen: Callable[[Container], bool]
    streaming: Streaming
    files: ImageFiles
    inspection: Inspection
    start_ups: StartUps


class OperatorServicer(operator_pb2_grpc.OperatorServicer):
    def __init__(self, services: OperatorServices) -> None:
        self.services = services

    # --- looking

    def StartUps(self, request: pb.StartUpsRequest, context: grpc.ServicerContext) -> pb.StartUpsResponse:
        del context
        found = (
            [self.services.start_ups.of(self._pod(request.id)[0].id)] if request.id else self.services.start_ups.all()
        )
        now = self.services.clock.monotonic()
        return pb.StartUpsResponse(start_ups=[_start_up(one, now) for one in found])

    def Pulls(self, request: pb.PullsRequest, context: grpc.ServicerContext) -> pb.PullsResponse:
        del request, context
        return pb.PullsResponse(
            pulls=[
                pb.Pull(image=one.image, received=one.received, total=one.total, began_at=one.began_at)
                for one in self.services.files.under_way()
            ]
        )

    def Inspect(self, request: pb.InspectRequest, context: grpc.ServicerContext) -> pb.InspectResponse:
        del context
        sandbox, container = self._pod(request.id)
        facts = self.services.inspection.of(sandbox, container, self.services.clock.monotonic())
        return pb.InspectResponse(json=json.dumps(facts))

    def FollowActions(self, request: pb.FollowActionsRequest, context: grpc.ServicerContext) -> Iterator[pb.Action]:
        """The initial metadata says that from here on nothing is missed."""
        since = request.since or self.services.clock.now_ns()
        if request.remembered_only:
            yield from map(_action, self.services.action_log.since(since))
            return
        left = threading.Event()

        def leave() -> None:
            left.set()
            self.services.action_log.wake()

        if not context.add_callback(leave):
            return  # the client has gone already
        context.send_initial_metadata(())
        yield from map(_action, self.services.action_log.follow(since, left))

    def DumpXml(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.DumpXmlResponse:
        del context
        return pb.DumpXmlResponse(xml=self.services.control.definition(self._vm(request.id).domain_uuid))

    def Screenshot(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ScreenshotResponse:
        del context
        container = self._with_screen(request.id)
        return pb.ScreenshotResponse(png=self.services.screenshots.take(container.id, _SCREENSHOT))

    def OpenScreen(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.OpenScreenResponse:
        """Whoever is here is root of the node, and needs no word of the pod's author: the annotation gives the VM its video card,
        and lets those in who may forward the pod's ports."""
        del context
        container = self._with_screen(request.id)
        sandbox = existing_sandbox(self.services.records, container.sandbox_id)
        address = sandbox.network.ips[0] if sandbox.network and sandbox.network.ips else ""
        wanted = ForwardRequest(sandbox.id, address, (VNC_PORT,), screen=container.id, pod=sandbox.key.readable)
        return pb.OpenScreenResponse(url=self.services.streaming.offer(wanted))

    def end_streams(self) -> None:
        """The server stops: nobody waits for streams that never end by themselves."""
        self.services.action_log.close()

    # --- doing

    def Pause(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        del context
        return _outcome(self.services.actions.pause(self._vm(request.id)))

    def Resume(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        del context
        return _outcome(self.services.actions.resume(self._vm(request.id)))

    def Reset(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        del context
        return _outcome(self.services.actions.reset(self._vm(request.id)))

    def Reboot(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        del context
        return _outcome(self.services.actions.reboot(self._vm(request.id)))

    def Freeze(self, request: pb.FreezeRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        del context
        return _outcome(self.services.actions.freeze(self._vm(request.id), request.seconds))

    def Thaw(self, request: pb.VmRequest, context: grpc.ServicerContext) -> pb.ActionResponse:
        del context
        return _outcome(self.services.actions.thaw(self._vm(request.id)))

    # --- which is meant

    def _pod(self, text: str) -> tuple[Sandbox, Container | None]:
        """The pod and, of its containers, the one that is meant: the one that was named, that runs, or that is the newest."""
        container = find_container(self.services.records, text)
        if container is not None:
            return existing_sandbox(self.services.records, container.sandbox_id), container
        sandbox = find_sandbox(self.services.records, text)
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


def _outcome(found: Outcome) -> pb.ActionResponse:
    return pb.ActionResponse(changed=found.changed, message=found.message)


log = structlog.get_logger(__name__)

# A screenshot of a large screen is some MiB.
_MESSAGE_BYTES: Final = 64 << 20
_CALLS: Final = 32


class OperatorServer:
    """Beside the CRI socket, and apart from it: whoever may talk CRI, such as kubelet, need not be able to reset VMs."""

    def __init__(self, path: str, directory: str, servicer: OperatorServicer, allowed: int = 0) -> None:
        """`directory`: of its own, for the socket behind the gate."""
        self._path = path
        self._directory = directory
        self._behind = f"{directory}/operator.sock"
        self._gate = RootGate(path, self._behind, allowed)
        self._servicer = servicer
        self._pool = Workers(_CALLS, "operator")
        self._server = grpc.server(
            self._pool,
            interceptors=[CallInterceptor(self._pool)],
            options=(("grpc.max_send_message_length", _MESSAGE_BYTES), ("grpc.so_reuseport", 0)),
        )
        operator_pb2_grpc.add_OperatorServicer_to_server(servicer, self._server)

    def start(self) -> None:
        """Raises WrongState if it cannot be served."""
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        os.chmod(self._directory, 0o700)
        listen(self._server, self._behind)
        self._server.start()
        self._gate.start()
        log.info("admin.serving", socket=self._path)

    def stop(self, grace: float) -> None:
        """Nobody is let in; calls under way get `grace` seconds, and streams end at once."""
        self._gate.stop()
        self._servicer.end_streams()
        self._server.stop(grace).wait()
        self._pool.shutdown(wait=False, cancel_futures=True)
