"""A streaming server on a real port, with URLs as the RPCs return them."""

from __future__ import annotations

import os
import socket

from fakes.clock import FakeClock
from fakes.sessions import FakeSessions

from virtshim.model.errors import Unavailable
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.streaming.connection import StreamTimeouts
from virtshim.streaming.ports import AttachStreams, ExecRequest, ForwardRequest, Screens, Streams
from virtshim.streaming.room import StreamLimits
from virtshim.streaming.server import StreamingServer
from virtshim.system.peers import connect_to

CONTAINER = ContainerId("c" * 64)
SANDBOX = SandboxId("5" * 64)


class OneScreen:
    """Implements `virtshim.streaming.ports.Screens`: all screens are the socket `path`, which this process listens on."""

    path = ""

    def connect(self, container: ContainerId) -> socket.socket:
        del container
        try:
            return connect_to(self.path, os.getpid(), 5)
        except OSError as exc:
            raise Unavailable(str(exc.strerror).lower()) from exc


class StreamNode:
    def __init__(self, timeouts: StreamTimeouts, limits: StreamLimits | None = None) -> None:
        self.clock = FakeClock()
        self.sessions = FakeSessions()
        self.screens: Screens = OneScreen()
        self.server = StreamingServer("127.0.0.1", 0, self.clock, timeouts, limits)

    def start(self) -> None:
        self.server.start(attaches=self.sessions, execs=self.sessions, screens=self.screens)

    def request(self, *command: str, **streams: bool) -> ExecRequest:
        wanted = Streams(**streams or {"stdin": True, "stdout": True, "stderr": True})
        return ExecRequest(CONTAINER, command or ("cat",), wanted)

    def exec(self, *command: str, **streams: bool) -> str:
        return self.server.offer(self.request(*command, **streams))

    def attach(self, **streams: bool) -> str:
        return self.server.offer(AttachStreams(CONTAINER, Streams(**streams or {"stdin": True, "stdout": True})))

    def forward(self, *ports: int, pod: str = "") -> str:
        return self.server.offer(ForwardRequest(SANDBOX, "127.0.0.1", ports, pod=pod))

    def forward_inside(self, *ports: int) -> str:
        return self.server.offer(ForwardRequest(SANDBOX, "127.0.0.1", ports, inside=CONTAINER))

    def forward_with_vnc(self, path: str, *ports: int) -> str:
        if isinstance(self.screens, OneScreen):
            self.screens.path = path
        return self.server.offer(ForwardRequest(SANDBOX, "127.0.0.1", ports, CONTAINER))
