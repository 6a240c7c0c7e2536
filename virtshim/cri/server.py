"""The CRI socket: its services, its threads and its mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog

from criproto.admin_v1 import admin_pb2, admin_pb2_grpc
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.cri.containers import ContainerCalls
from virtshim.cri.exec_attach_forward import ExecAttachForwardCalls
from virtshim.cri.images import ImageServicer
from virtshim.cri.interceptors import CallInterceptor
from virtshim.cri.node import NodeCalls
from virtshim.cri.sandboxes import SandboxCalls
from virtshim.cri.stats import StatsCalls
from virtshim.guest.login import check_user, parse_keys
from virtshim.guest.ports import GuestOperations
from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.pods.lookup import get_running_container, pod_of
from virtshim.store.ports import Records
from virtshim.streaming.ports import AttachStreams, Streaming, Streams
from virtshim.system.grpc_socket import listen
from virtshim.system.threads import Workers

log = structlog.get_logger(__name__)

_SECONDS: Final = 30.0
_MAX_KEYS: Final = 100


@dataclass(frozen=True)
class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Serves virtshim's own commands on the CRI socket."""

    records: Records
    guests: GuestOperations
    streaming: Streaming

    def AddSshKeys(
        self, request: admin_pb2.AddSshKeysRequest, context: grpc.ServicerContext
    ) -> admin_pb2.AddSshKeysResponse:
        check_user(request.user)
        keys = parse_keys("\n".join(request.keys))
        if not 1 <= len(keys) <= _MAX_KEYS:
            raise InvalidRequest(f"{len(keys)} SSH keys: give 1 to {_MAX_KEYS}")
        container = get_running_container(self.records, request.container_id)
        self.guests.add_ssh_keys(container.id, request.user, keys, _SECONDS)
        log.info("guest.ssh_keys.added", container=container.id.short, user=request.user, keys=len(keys))
        return admin_pb2.AddSshKeysResponse()

    def AttachConsole(
        self, request: admin_pb2.AttachConsoleRequest, context: grpc.ServicerContext
    ) -> admin_pb2.AttachConsoleResponse:
        container = get_running_container(self.records, request.container_id)
        config = container.config
        if request.stdin and not config.stdin:
            raise WrongState(f"container {container.id.short} was created without stdin; set stdin in its spec to type")
        streams = Streams(stdin=request.stdin, stdout=True, tty=True)
        wanted = AttachStreams(container.id, streams, config.stdin_once, pod=pod_of(self.records, container))
        return admin_pb2.AttachConsoleResponse(url=self.streaming.offer(wanted))


class RuntimeServicer(
    NodeCalls,
    SandboxCalls,
    ContainerCalls,
    ExecAttachForwardCalls,
    StatsCalls,
    api_pb2_grpc.RuntimeServiceServicer,
):
    """Combines all parts of RuntimeService; a call is in the file of its subject. Each call converts the request, calls one use
    case and converts the answer. Calls that no part defines answer UNIMPLEMENTED."""


# The limit of kubelet and containerd. gRPC's default of 4 MiB is too small for the lists of a big node.
_MESSAGE_BYTES: Final = 16 << 20
# Threads for the calls that kubelet repeats all the time; each takes milliseconds.
_FREQUENT_CALLS: Final = 32


class CriServer:
    """Serves CRI and virtshim's own commands on one Unix socket. It must start after recovery: an empty list would tell kubelet
    that all pods have died."""

    def __init__(
        self,
        socket_path: str,
        max_calls: int,
        runtime: RuntimeServicer,
        image: ImageServicer,
        admin: AdminServicer,
        about: Callable[[Any], dict[str, str]],
    ) -> None:
        """`about`: names the subject of a request, for the log."""
        self._path = socket_path
        self._pool = Workers(max_calls, "cri")
        self._frequent = Workers(_FREQUENT_CALLS, "cri-frequent")
        self._server = grpc.server(
            self._pool,
            interceptors=[CallInterceptor(self._frequent, about)],
            options=(
                ("grpc.max_receive_message_length", _MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
            ),
        )
        self._runtime = runtime
        api_pb2_grpc.add_RuntimeServiceServicer_to_server(runtime, self._server)
        api_pb2_grpc.add_ImageServiceServicer_to_server(image, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, self._server)

    def start(self) -> None:
        """The caller holds the path's `SocketLock`. The socket has mode 0600 from the start."""
        listen(self._server, self._path)
        self._server.start()
        log.info("cri.serving", socket=self._path)

    def stop(self, grace: float) -> None:
        """Refuses new calls and ends event streams at once; other running calls get `grace` seconds."""
        stopped = self._server.stop(grace)
        self._runtime.end_streams()
        stopped.wait()
        for pool in (self._pool, self._frequent):
            pool.shutdown(wait=False, cancel_futures=True)
