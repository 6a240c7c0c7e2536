"""The streaming server's control side, without a server."""

from __future__ import annotations

from virtshim.domain.guest.streaming import StreamRequest
from virtshim.domain.ids import ContainerId, SandboxId


class FakeStreaming:
    """Implements `virtshim.ports.Streaming`."""

    def __init__(self) -> None:
        self.offered: list[StreamRequest] = []
        self.ended: list[ContainerId | SandboxId] = []

    def offer(self, request: StreamRequest) -> str:
        self.offered.append(request)
        return f"http://127.0.0.1:1/{len(self.offered)}"

    def end_container(self, container: ContainerId) -> None:
        self.ended.append(container)

    def end_sandbox(self, sandbox: SandboxId) -> None:
        self.ended.append(sandbox)
