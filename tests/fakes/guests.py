"""Guests whose commands do what a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from virtshim.domain.errors import Unavailable
from virtshim.domain.guest_command import CommandResult, GuestCommand
from virtshim.domain.ids import ContainerId
from virtshim.domain.streaming import Streams
from virtshim.ports import StreamSession

Run = Callable[[GuestCommand, float, threading.Event], CommandResult]


def _echo(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
    return CommandResult(0, " ".join(command.argv).encode() + b"\n", b"")


class FakeGuests:
    """Implements `virtshim.ports.GuestAgents`. `do` runs a command; `sessions` are handed out by `open`, oldest first."""

    def __init__(self) -> None:
        self.do: Run = _echo
        self.commands: list[GuestCommand] = []
        self.sessions: list[StreamSession] = []
        self.told: dict[str, object] = {}
        self.forgotten: list[ContainerId] = []

    def run(
        self, container: ContainerId, command: GuestCommand, timeout: float, cancelled: threading.Event
    ) -> CommandResult:
        self.commands.append(command)
        return self.do(command, timeout, cancelled)

    async def open(self, container: ContainerId, command: GuestCommand, streams: Streams) -> StreamSession:
        self.commands.append(command)
        if not self.sessions:
            raise Unavailable("no guest agent answers")
        return self.sessions.pop(0)

    def facts(self, container: ContainerId, timeout: float) -> Mapping[str, object]:
        return self.told

    def forget(self, container: ContainerId) -> None:
        self.forgotten.append(container)
