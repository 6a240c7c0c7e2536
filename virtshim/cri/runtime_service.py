"""RuntimeService, put together: each call is in the part that its subject names."""

from __future__ import annotations

from criproto.runtime_v1 import api_pb2_grpc
from virtshim.cri.containers import ContainerCalls
from virtshim.cri.events import EventCalls
from virtshim.cri.exec_attach_forward import ExecAttachForwardCalls
from virtshim.cri.node import NodeCalls
from virtshim.cri.sandboxes import SandboxCalls
from virtshim.cri.stats import StatsCalls


class RuntimeServicer(
    NodeCalls,
    SandboxCalls,
    ContainerCalls,
    ExecAttachForwardCalls,
    StatsCalls,
    EventCalls,
    api_pb2_grpc.RuntimeServiceServicer,
):
    """Each call converts, asks one use case, converts. What no part defines answers UNIMPLEMENTED."""
