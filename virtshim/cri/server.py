"""The CRI socket: who may serve it, its mode, the threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc
import structlog

from criproto.admin_v1 import admin_pb2_grpc
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.cri.admin import AdminServicer
from virtshim.cri.images import ImageServicer
from virtshim.cri.interceptors import CallInterceptor
from virtshim.cri.runtime_service import RuntimeServicer
from virtshim.grpc_socket import listen
from virtshim.primitives.threads import Workers

log = structlog.get_logger(__name__)

# kubelet's and containerd's limit; gRPC's default of 4 MiB is too small for the lists of a big node.
_MESSAGE_BYTES: Final = 16 << 20
# Of the calls that kubelet repeats all the time, answered in milliseconds.
_FREQUENT_CALLS: Final = 32


class CriServer:
    """Serves CRI's services, and that of our own commands, on one Unix socket. Start it only after recovery: an empty list
    means to kubelet that all pods died."""

    def __init__(
        self,
        socket_path: str,
        max_calls: int,
        runtime: RuntimeServicer,
        image: ImageServicer,
        admin: AdminServicer,
        about: Callable[[Any], dict[str, str]],
    ) -> None:
        """`about`: whom a request is about, for the log."""
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
        """The caller holds the path's `SocketLock`. The socket is 0600 from its first moment."""
        listen(self._server, self._path)
        self._server.start()
        log.info("cri.serving", socket=self._path)

    def stop(self, grace: float) -> None:
        """New calls are refused and event streams ended at once; other calls under way get `grace` seconds."""
        stopped = self._server.stop(grace)
        self._runtime.end_streams()
        stopped.wait()
        for pool in (self._pool, self._frequent):
            pool.shutdown(wait=False, cancel_futures=True)
