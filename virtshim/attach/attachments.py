"""Which of a container's streams a client attaches to: its entrypoint's, or the console."""

from __future__ import annotations

from virtshim.domain.guest.streaming import AttachStreams
from virtshim.ports.streaming import Attaches, StreamSession


class Attachments:
    """Implements `virtshim.ports.Attaches`."""

    def __init__(self, consoles: Attaches, commands: Attaches) -> None:
        self._consoles = consoles
        self._commands = commands

    async def attach(self, request: AttachStreams) -> StreamSession:
        return await (self._commands if request.to_entrypoint else self._consoles).attach(request)
