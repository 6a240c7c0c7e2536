"""The pod's end of a forwarded connection that is dialed inside the guest: a command there, whose streams are the connection."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from virtshim.domain.guest.streaming import Ended, Output, OutStream
from virtshim.domain.ids import ContainerId
from virtshim.domain.printable import printable_text
from virtshim.ports.streaming import Execs, StreamSession
from virtshim.streaming.portforward.splice import Dial, ForwardFailed, PodEnd

log = structlog.get_logger(__name__)

# Bytes of the guest's error message.
_WORDS: Final = 300
# Seconds that a command gets to be ended.
_CLEAN_UP: Final = 10.0


class GuestPodEnd:
    """Implements `splice.PodEnd`."""

    def __init__(self, session: StreamSession, port: int) -> None:
        self._session = session
        self._port = port
        self._words = b""
        self._over = False

    async def read(self) -> bytes:
        while True:
            match await self._session.read():
                case Output(OutStream.STDOUT, data):
                    return data
                case Output(_, data):
                    self._words = (self._words + data)[:_WORDS]
                case Ended(code):
                    self._over = True
                    if code:
                        raise ForwardFailed(
                            f"connecting to port {self._port} inside the guest failed: {self._reason(code)}"
                        )
                    return b""

    async def write(self, data: bytes) -> None:
        await self._session.write_stdin(data)

    async def finish(self) -> None:
        await self._session.close_stdin()

    def is_over(self) -> bool:
        return self._over

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_CLEAN_UP):
                await self._session.close()
        except TimeoutError:
            log.warning("streaming.session.stuck", seconds=_CLEAN_UP)

    def _reason(self, code: int) -> str:
        words = " ".join(self._words.decode(errors="replace").split())
        return printable_text(words) or f"exit code {code}"


def in_guest(execs: Execs, container: ContainerId) -> Dial:
    """Dials the loopback of that container's guest, whatever the address."""

    async def dial_inside(address: str, port: int) -> PodEnd:
        del address
        return GuestPodEnd(await execs.dial(container, port), port)

    return dial_inside
