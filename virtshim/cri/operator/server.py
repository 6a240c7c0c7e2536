"""The admin socket: what it serves, on which threads, and for whom."""

from __future__ import annotations

import os
from typing import Final

import grpc
import structlog

from criproto.operator_v1 import operator_pb2_grpc
from virtshim.cri.interceptors import CallInterceptor
from virtshim.cri.operator.root_gate import RootGate
from virtshim.cri.operator.servicer import OperatorServicer
from virtshim.grpc_socket import listen
from virtshim.primitives.threads import Workers

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
