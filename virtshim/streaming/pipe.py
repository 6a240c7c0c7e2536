"""A bounded pipe of bytes between two tasks: the writer waits when the reader does not keep up."""

from __future__ import annotations

import asyncio


class Pipe:
    """One task writes (`room`, then `put`), one reads. Holds at most `limit` bytes and one piece."""

    def __init__(self, limit: int = 256 << 10) -> None:
        self._limit = limit
        self._bytes = bytearray()
        self._ended = False
        self._discarding = False
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def ended(self) -> bool:
        return self._ended

    async def room(self) -> None:
        """Returns when there is room."""
        await self._room.wait()

    def put(self, data: bytes) -> None:
        if self._discarding or self._ended or not data:
            return
        self._bytes += data
        if len(self._bytes) >= self._limit:
            self._room.clear()
        self._changed.set()

    def end(self) -> None:
        """No more comes; what is there can still be read."""
        self._ended = True
        self._changed.set()

    def discard(self) -> None:
        """Nobody reads any more: what is there and what comes is thrown away, and there is always room."""
        self._discarding = True
        self._bytes.clear()
        self._room.set()

    async def read(self) -> bytes:
        """All that is there, at least one byte; b"" at the end, again and again."""
        while not self._bytes and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        data = bytes(self._bytes)
        self._bytes.clear()
        self._room.set()
        return data
