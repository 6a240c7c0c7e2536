"""ExecSync."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.domain.errors import InvalidRequest
from virtshim.domain.guest.command import CommandResult
from virtshim.queries.lookup import get_container

if TYPE_CHECKING:
    from virtshim.cri.runtime import Services

# A client's limit is 16 MiB for the message: both streams and the little around them.
_OUTPUT_ROOM = (16 << 20) - 1024


class ExecCalls:
    """Part of RuntimeServicer."""

    _do: Services

    def ExecSync(self, request: pb.ExecSyncRequest, context: grpc.ServicerContext) -> pb.ExecSyncResponse:
        """Output that does not fit into the answer is left out."""
        if request.timeout < 0:
            raise InvalidRequest(f"timeout {request.timeout} is negative; 0 means no limit")
        container = get_container(self._do.records, request.container_id)
        cancelled = threading.Event()
        if not context.add_callback(cancelled.set):
            cancelled.set()
        result = self._do.exec_command.run(container, tuple(request.cmd), float(request.timeout), cancelled)
        stdout, stderr = fitting(result, _OUTPUT_ROOM)
        return pb.ExecSyncResponse(stdout=stdout, stderr=stderr, exit_code=result.code)


def fitting(result: CommandResult, room: int) -> tuple[bytes, bytes]:
    """The beginnings of both streams, `room` bytes together at most: each may have what the other leaves, and half in any
    case."""
    stderr = result.stderr[: max(room // 2, room - len(result.stdout))]
    return result.stdout[: room - len(stderr)], stderr
