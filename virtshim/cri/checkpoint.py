"""CheckpointContainer. CheckpointPod and RestorePod are not defined: they answer UNIMPLEMENTED."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.domain.deadline import Deadline
from virtshim.domain.errors import InvalidRequest
from virtshim.queries.lookup import get_container

if TYPE_CHECKING:
    from virtshim.cri.runtime import Services

# Seconds for a caller that names no time and has no deadline of its own.
_DEFAULT = 240.0


class CheckpointCalls:
    """Part of RuntimeServicer."""

    _do: Services

    def CheckpointContainer(
        self, request: pb.CheckpointContainerRequest, context: grpc.ServicerContext
    ) -> pb.CheckpointContainerResponse:
        if not request.location:
            raise InvalidRequest("CheckpointContainer: location is empty")
        if request.timeout < 0:
            raise InvalidRequest(f"CheckpointContainer: timeout {request.timeout} is negative")
        container = get_container(self._do.records, request.container_id)
        # kubelet's own deadline for this call is the longer of its usual one and this timeout.
        seconds = float(request.timeout) or min(context.time_remaining(), _DEFAULT)
        deadline = Deadline.after(self._do.clock.monotonic(), seconds)
        self._do.checkpoint_container.checkpoint(container, request.location, deadline)
        return pb.CheckpointContainerResponse()
