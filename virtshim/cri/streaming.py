"""The RPCs that hand out URLs of the streaming server: Exec, Attach, PortForward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.domain.annotations import SCREEN
from virtshim.domain.container import Container, ContainerPhase
from virtshim.domain.errors import WrongState
from virtshim.domain.layout import screen_socket
from virtshim.domain.sandbox import Sandbox
from virtshim.domain.streaming import AttachStreams, ExecRequest, ForwardRequest, Streams
from virtshim.services.lookup import get_container, get_sandbox

if TYPE_CHECKING:
    from virtshim.cri.runtime import Services


class StreamingCalls:
    """Part of RuntimeServicer."""

    _do: Services

    def Exec(self, request: pb.ExecRequest, context: grpc.ServicerContext) -> pb.ExecResponse:
        del context
        container = get_container(self._do.records, request.container_id)
        wanted = ExecRequest(container.id, tuple(request.cmd), _streams(request))
        _must_run(container)
        return pb.ExecResponse(url=self._do.streaming.offer(wanted))

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachResponse:
        del context
        container = get_container(self._do.records, request.container_id)
        wanted = AttachStreams(container.id, _streams(request), container.config.stdin_once, bool(container.command))
        _must_run(container)
        if wanted.streams.stdin and not container.config.stdin:
            raise WrongState(
                f"container {container.id.short} was created without stdin; attach without it, or set stdin in its spec"
            )
        return pb.AttachResponse(url=self._do.streaming.offer(wanted))

    def PortForward(self, request: pb.PortForwardRequest, context: grpc.ServicerContext) -> pb.PortForwardResponse:
        del context
        sandbox = get_sandbox(self._do.records, request.pod_sandbox_id)
        if not sandbox.is_ready or sandbox.network is None or not sandbox.network.ips:
            raise WrongState(f"pod sandbox {sandbox.id.short} is not ready: it has no network to forward to")
        wanted = ForwardRequest(sandbox.id, sandbox.network.ips[0], tuple(request.port), self._screen_of(sandbox))
        return pb.PortForwardResponse(url=self._do.streaming.offer(wanted))

    def _screen_of(self, sandbox: Sandbox) -> str:
        """The VNC socket of the VM that runs in it; "" if there is none, or the pod did not ask for one."""
        if sandbox.config.annotations.get(SCREEN) != "true":
            return ""
        containers = self._do.records.containers.all()
        running = [c for c in containers if c.sandbox_id == sandbox.id and c.phase is ContainerPhase.RUNNING]
        return screen_socket(self._do.layout, running[0].id) if running else ""


def _streams(request: pb.ExecRequest | pb.AttachRequest) -> Streams:
    return Streams(stdin=request.stdin, stdout=request.stdout, stderr=request.stderr, tty=request.tty)


def _must_run(container: Container) -> None:
    if container.phase is not ContainerPhase.RUNNING:
        raise WrongState(f"container {container.id.short} is {container.phase.value}, not running")
