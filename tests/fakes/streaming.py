"""The control side of a streaming server, without a server."""

from __future__ import annotations

from collections.abc import Mapping

from virtshim.model.ids import ContainerId, SandboxId
from virtshim.streaming.ports import StreamRequest


class FakeStreaming:
    """Implements `virtshim.streaming.ports.Streaming`."""

    def __init__(self) -> None:
        self.offered: list[StreamRequest] = []
        self.refusals: dict[str, int] = {}
        self.ended: list[ContainerId | SandboxId] = []

    def offer(self, request: StreamRequest) -> str:
        self.offered.append(request)
        return f"http://127.0.0.1:1/{len(self.offered)}"

    def refused(self, pod: str) -> Mapping[str, int]:
        return {"urls": 0, "sessions": 0, "connections": 0, **self.refusals}

    def end_container(self, container: ContainerId) -> None:
        self.ended.append(container)

    def end_sandbox(self, sandbox: SandboxId) -> None:
        self.ended.append(sandbox)
