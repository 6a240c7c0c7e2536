"""What both kinds of attach share: which of them serves a request, their limits, and what clients are told of those."""

from __future__ import annotations

from typing import Final

from virtshim.domain.errors import ResourceExhausted, WrongState
from virtshim.domain.guest.streaming import AttachStreams, Output, OutStream
from virtshim.domain.ids import ContainerId
from virtshim.ports.streaming import Attaches, StreamSession

MAX_CLIENTS: Final = 16
# Bytes that wait for one client, and for all of one VM.
MAX_WAITING: Final = 1 << 20
_WAITING_OF_VM: Final = 4 << 20


class Attachments:
    """A container's entrypoint, or its console. Implements `virtshim.ports.streaming.Attaches`."""

    def __init__(self, consoles: Attaches, commands: Attaches) -> None:
        self._consoles = consoles
        self._commands = commands

    async def attach(self, request: AttachStreams) -> StreamSession:
        return await (self._commands if request.to_entrypoint else self._consoles).attach(request)


def input_ended(container: ContainerId) -> WrongState:
    return WrongState(
        f"the input of container {container.short} ended with its first client (stdinOnce); attach without stdin"
    )


def too_many_clients(container: ContainerId) -> ResourceExhausted:
    return ResourceExhausted(f"{MAX_CLIENTS} clients are attached to container {container.short}; one must leave first")


def room_for_each(clients: int) -> int:
    """Bytes that may wait for each of so many."""
    return min(MAX_WAITING, _WAITING_OF_VM // max(1, clients))


def bytes_lost(count: int) -> Output:
    """In the place of what a client did not read in time."""
    return Output(OutStream.STDOUT, f"\r\n[virtshim: {count} bytes lost: this client reads too slowly]\r\n".encode())
