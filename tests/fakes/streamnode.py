"""A streaming server on a real port, and URLs as the RPCs hand them out."""

from __future__ import annotations

from fakes.clock import FakeClock
from fakes.sessions import FakeSessions

from virtshim.domain.guest.streaming import AttachStreams, ExecRequest, ForwardRequest, Streams
from virtshim.domain.ids import ContainerId, SandboxId
from virtshim.streaming.connection import StreamTimeouts
from virtshim.streaming.server import StreamingServer

CONTAINER = ContainerId("c" * 64)
SANDBOX = SandboxId("5" * 64)


class StreamNode:
    def __init__(self, limits: StreamTimeouts) -> None:
        self.clock = FakeClock()
        self.sessions = FakeSessions()
        self.server = StreamingServer("127.0.0.1", 0, self.clock, limits)

    def start(self) -> None:
        self.server.start(attaches=self.sessions, execs=self.sessions)

    def request(self, *command: str, **streams: bool) -> ExecRequest:
        wanted = Streams(**streams or {"stdin": True, "stdout": True, "stderr": True})
        return ExecRequest(CONTAINER, command or ("cat",), wanted)

    def exec(self, *command: str, **streams: bool) -> str:
        return self.server.offer(self.request(*command, **streams))

    def attach(self, **streams: bool) -> str:
        return self.server.offer(AttachStreams(CONTAINER, Streams(**streams or {"stdin": True, "stdout": True})))

    def forward(self, *ports: int) -> str:
        return self.server.offer(ForwardRequest(SANDBOX, "127.0.0.1", ports))

    def forward_inside(self, *ports: int) -> str:
        return self.server.offer(ForwardRequest(SANDBOX, "127.0.0.1", ports, inside=CONTAINER))

    def forward_with_vnc(self, socket: str, *ports: int) -> str:
        return self.server.offer(ForwardRequest(SANDBOX, "127.0.0.1", ports, socket))
