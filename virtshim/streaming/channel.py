"""Bounded pipes of bytes, and the client's connection as a channel."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")


async def run_until(main: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, Any]) -> T | None:
    """Returns the result of `main`. If one of the others returns first, cancels `main` and returns None; if one raises
    first, raises its exception. All tasks have ended afterwards."""
    first = asyncio.ensure_future(main)
    rest = [asyncio.ensure_future(other) for other in others]
    try:
        await asyncio.wait([first, *rest], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (first, *rest):
            if not task.done():
                task.cancel()
        await asyncio.gather(first, *rest, return_exceptions=True)
    if not first.cancelled():
        return first.result()
    for task in rest:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return None


async def then_wait_forever(work: Coroutine[Any, Any, Any]) -> None:
    """For a task in `run_until` whose end must not end the others."""
    await work
    await asyncio.Event().wait()


class ByteRoom(Protocol):
    """A limit for what several pipes hold together."""

    def allowed(self, mine: int) -> int:
        """How many more bytes a pipe that holds `mine` may hold."""

    def hold(self, more: int) -> None:
        """Counts `more` bytes as held; negative for released ones."""

    def wait(self, event: asyncio.Event) -> None:
        """Sets the event when there may be more room."""


class Pipe:
    """A bounded pipe: one task writes (`room`, then `put` of what fits) and waits if the other does not read fast enough.
    Holds at most `limit` bytes and one piece. Counts waiting bytes against `room`, and those of the last `read` until the
    next one, because the reader is still passing them on."""

    def __init__(self, room: ByteRoom, limit: int = 256 << 10) -> None:
        self._limit = limit
        self._shared = room
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
        """The number of unread bytes."""
        return len(self._bytes)

    async def room(self) -> int:
        """Waits for room and returns how many bytes fit."""
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
        """Ends the input; waiting bytes can still be read."""
        self._ended = True
        self._changed.set()

    def discard(self) -> None:
        """Ends the reading: drops all present and future bytes, so there is always room."""
        self._discarding = True
        self._shared.hold(-len(self._bytes) - self._passing)
        self._passing = 0
        self._bytes.clear()
        self._room.set()

    async def read(self) -> bytes:
        """All waiting bytes, at least one; b"" at the end, also repeatedly."""
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


# The size of one read, and the limit of unsent bytes for a client that does not read.
PIECE: Final = 64 << 10
# The kernel's send buffer. By default it would grow to 4 MiB for each connection whose peer does not read.
SEND_BUFFER: Final = 256 << 10

# After so many frames of one read, other tasks get their turn. One read may have ten thousand frames, but clients that send large
# frames never reach this number.
TURN: Final = 16

_ESTABLISHED: Final = 1  # tcpi_state, the first byte of struct tcp_info


class Gone(Exception):
    """The peer has left, or reset the stream."""


# Seconds between checks whether the last bytes have arrived.
_DELIVERY_CHECK: Final = 0.05


async def put(pipe: Pipe, data: bytes, gone: Callable[[], bool], look_every: float = 5.0) -> None:
    """Waits for room while the client is there, which it checks every `look_every` seconds. Raises Gone."""
    while data:
        try:
            async with asyncio.timeout(look_every):
                fits = await pipe.room()
        except TimeoutError:
            if gone():
                raise Gone("the client left while its input waited") from None
            continue
        pipe.put(data[:fits])
        data = data[fits:]


class ByteChannel(Protocol):
    async def receive(self) -> bytes:
        """At least one byte; b"" after the peer's end of input. Raises Gone."""

    async def send(self, data: bytes) -> None:
        """Waits while the peer does not read. Raises Gone."""

    def gone(self) -> bool:
        """Whether the peer has left; also works while nothing is read."""


class TcpChannel:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unread = b""
        self._loop = asyncio.get_running_loop()
        self.active_at = self._loop.time()
        writer.transport.set_write_buffer_limits(high=PIECE)

    async def receive(self) -> bytes:
        if self._unread:
            data, self._unread = self._unread, b""
            return data
        try:
            data = await self._reader.read(PIECE)
        except OSError as exc:
            raise Gone(str(exc)) from exc
        self.active_at = self._loop.time()
        return data

    def unread(self, data: bytes) -> None:
        """Puts received bytes back for the next `receive`."""
        self._unread = data

    async def send(self, data: bytes) -> None:
        if not data:
            return
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as exc:
            raise Gone(str(exc)) from exc
        self.active_at = self._loop.time()

    def gone(self) -> bool:
        """Asks the kernel, because the end of input is not visible while a full pipe keeps us from reading."""
        if self._writer.transport.is_closing():
            return True
        sock = self._writer.get_extra_info("socket")
        try:
            return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED)
        except OSError:
            return True

    async def idle(self, seconds: float) -> None:
        """Returns when no byte has moved for `seconds`."""
        while True:
            left = self.active_at + seconds - self._loop.time()
            if left <= 0:
                return
            await asyncio.sleep(left)

    async def delivered(self, seconds: float) -> None:
        """Returns when the peer's system has received everything, when the peer has left, or after `seconds`. The
        peer may not read for a while, e.g. while a user looks at a page of output."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.gone() and self._on_the_way():  # noqa: ASYNC110  the kernel has no event for it
                    await asyncio.sleep(_DELIVERY_CHECK)

    def _on_the_way(self) -> int:
        """Bytes that the peer's system has not acknowledged. Raises OSError."""
        sock = self._writer.get_extra_info("socket")
        unacknowledged: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
        return unacknowledged + self._writer.transport.get_write_buffer_size()

    async def close(self, seconds: float) -> None:
        """Sends all waiting bytes and the end, and reads the peer's remaining bytes: a close with unread input would
        discard output that the peer has not read yet. Cuts the connection after `seconds`."""
        with contextlib.suppress(OSError, TimeoutError):
            self._writer.transport.set_write_buffer_limits(high=0)  # drain() now waits until all is sent
            async with asyncio.timeout(seconds):
                await self._writer.drain()
                self._writer.write_eof()
                while await self._reader.read(PIECE):
                    pass
        self._writer.transport.abort()
