"""ExecSync, and Exec, Attach and PortForward, which return URLs of the streaming server."""

from __future__ import annotations

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.annotations.parse import FORWARD_ANNOTATION, VNC_ANNOTATION
from virtshim.cri.services import ServicerPart, set_when_cancelled
from virtshim.guest.command import CommandResult
from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.sandbox import Sandbox
from virtshim.pods.lookup import get_any_sandbox, get_container, pod_of, require_running
from virtshim.streaming.ports import AttachStreams, ExecRequest, ForwardRequest, Streams

# Clients accept messages of 16 MiB, which must hold both streams and the other fields.
_OUTPUT_ROOM = (16 << 20) - 1024


class ExecAttachForwardCalls(ServicerPart):
    def ExecSync(self, request: pb.ExecSyncRequest, context: grpc.ServicerContext) -> pb.ExecSyncResponse:
        """Cuts off output that does not fit into the answer."""
        if request.timeout < 0:
            raise InvalidRequest(f"timeout {request.timeout} is negative; 0 means no limit")
        container = get_container(self._services.records, request.container_id)
        cancelled = set_when_cancelled(context)
        result = self._services.exec_command.run(container, tuple(request.cmd), float(request.timeout), cancelled)
        stdout, stderr = fitting(result, _OUTPUT_ROOM)
        return pb.ExecSyncResponse(stdout=stdout, stderr=stderr, exit_code=result.code)

    def Exec(self, request: pb.ExecRequest, context: grpc.ServicerContext) -> pb.ExecResponse:
        container = get_container(self._services.records, request.container_id)
        wanted = ExecRequest(
            container.id, tuple(request.cmd), _streams(request), pod_of(self._services.records, container)
        )
        require_running(container)
        return pb.ExecResponse(url=self._services.streaming.offer(wanted))

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachResponse:
        container = get_container(self._services.records, request.container_id)
        wanted = AttachStreams(
            container.id,
            _streams(request),
            container.config.stdin_once,
            bool(container.spec.command),
            pod_of(self._services.records, container),
        )
        require_running(container)
        if wanted.streams.stdin and not container.config.stdin:
            raise WrongState(
                f"container {container.id.short} was created without stdin; attach without stdin, or set stdin in the pod's spec"
            )
        return pb.AttachResponse(url=self._services.streaming.offer(wanted))

    def PortForward(self, request: pb.PortForwardRequest, context: grpc.ServicerContext) -> pb.PortForwardResponse:
        sandbox = get_any_sandbox(self._services.records, request.pod_sandbox_id)
        if not sandbox.is_ready or sandbox.network is None or not sandbox.network.ips:
            raise WrongState(f"pod sandbox {sandbox.id.short} is not ready: it has no network to forward to")
        address, ports = sandbox.network.ips[0], tuple(request.port)
        screen, inside = self._screen_of(sandbox), self._dialing_guest(sandbox)
        wanted = ForwardRequest(sandbox.id, address, ports, screen, inside, sandbox.key.readable)
        return pb.PortForwardResponse(url=self._services.streaming.offer(wanted))

    def _screen_of(self, sandbox: Sandbox) -> ContainerId | None:
        """The sandbox's running container; None if nothing runs, or if the pod did not ask for a screen."""
        if sandbox.config.annotations.get(VNC_ANNOTATION) != "true":
            return None
        return self._running_in(sandbox)

    def _dialing_guest(self, sandbox: Sandbox) -> ContainerId | None:
        """The container whose guest dials the ports; None if the node dials. Raises WrongState if it does not run."""
        if sandbox.config.annotations.get(FORWARD_ANNOTATION) != "agent":
            return None
        running = self._running_in(sandbox)
        if running is None:
            raise WrongState(
                f"pod sandbox {sandbox.id.short} has no running container to dial the ports in ({FORWARD_ANNOTATION})"
            )
        return running

    def _running_in(self, sandbox: Sandbox) -> ContainerId | None:
        containers = self._services.records.containers.all()
        running = [c for c in containers if c.sandbox_id == sandbox.id and c.is_running]
        return running[0].id if running else None


def _streams(request: pb.ExecRequest | pb.AttachRequest) -> Streams:
    return Streams(stdin=request.stdin, stdout=request.stdout, stderr=request.stderr, tty=request.tty)


def fitting(result: CommandResult, room: int) -> tuple[bytes, bytes]:
    """The beginnings of both streams, together at most `room` bytes. Each may use half of the room and what the other leaves."""
    stderr = result.stderr[: max(room // 2, room - len(result.stdout))]
    return result.stdout[: room - len(stderr)], stderr
