"""A bounded pipe of bytes between two tasks: the writer waits when the reader does not keep up."""

from __future__ import annotations

import asyncio
import sys
from typing import Protocol


class ByteRoom(Protocol):
    """What several pipes may hold together."""

    def allowed(self, mine: int) -> int:
        """How many bytes more a pipe may hold that holds `mine`."""

    def hold(self, more: int) -> None:
        """So many more, or fewer, are held."""

    def wait(self, event: asyncio.Event) -> None:
        """It is set when there may be more room than now."""


class Boundless:
    """Implements `ByteRoom` for a pipe that has only its own limit."""

    def allowed(self, mine: int) -> int:
        del mine
        return sys.maxsize

    def hold(self, more: int) -> None:
        pass

    def wait(self, event: asyncio.Event) -> None:
        pass


class Pipe:
    """One task writes (`room`, then `put` of what fits), one reads. Holds at most `limit` bytes and one piece, and of `room` what
    waits here and what was read last: until the next `read` its reader is still passing that on."""

    def __init__(self, limit: int = 256 << 10, room: ByteRoom | None = None) -> None:
        self._limit = limit
        self._shared = room or Boundless()
        self._bytes = bytearray()
        self._passing = 0
        self._ended = False
        self._discarding = False
        self._changed = asyncio.Event()
        self._room = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def waiting(self) -> int:
        """Bytes that nobody has read yet."""
        return len(self._bytes)

    async def room(self) -> int:
        """Returns when there is room: for how many bytes."""
        while not (fits := self._fits()):
            self._room.clear()
            self._shared.wait(self._room)
            await self._room.wait()
        return fits

    def _fits(self) -> int:
        if self._discarding:
            return sys.maxsize
        return self._shared.allowed(len(self._bytes) + self._passing) if len(self._bytes) < self._limit else 0

    def put(self, data: bytes) -> None:
        if self._discarding or self._ended or not data:
            return
        self._bytes += data
        self._shared.hold(len(data))
        self._changed.set()

    def end(self) -> None:
        """No more comes; what is there can still be read."""
        self._ended = True
        self._changed.set()

    def discard(self) -> None:
        """Nobody reads any more: what is there and what comes is thrown away, and there is always room."""
        self._discarding = True
        self._shared.hold(-len(self._bytes) - self._passing)
        self._passing = 0
        self._bytes.clear()
        self._room.set()

    async def read(self) -> bytes:
        """All that is there, at least one byte; b"" at the end, again and again."""
        if self._passing:
            self._shared.hold(-self._passing)
            self._passing = 0
            self._room.set()
        while not self._bytes and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        data = bytes(self._bytes)
        self._passing = len(data)
        self._bytes.clear()
        self._room.set()
        return data
