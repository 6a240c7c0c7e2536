"""The client's connection as a bounded two-way channel of bytes."""

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

# Tasks of which the first to end cancels the others.

T = TypeVar("T")


async def run_until(main: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, Any]) -> T | None:
    """The result of `main`; None, and `main` is cancelled, if one of the others returns first; if it raises first, its exception.
    Returns when all tasks have ended."""
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
    """For a task beside another in `run_until` whose end must not end the other."""
    await work
    await asyncio.Event().wait()


# A bounded pipe of bytes between two tasks: the writer waits when the reader does not keep up.


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


# One read, and the most that waits to be sent to a client that does not read.
PIECE: Final = 64 << 10
# What the kernel holds of it; by itself it would take up to 4 MiB for each connection whose peer does not read.
SEND_BUFFER: Final = 256 << 10

# Frames of one read, after which others get their turn: there may be ten thousand. Those of a client that sends what it has in
# large ones never are so many.
TURN: Final = 16

_ESTABLISHED: Final = 1  # tcpi_state, the first byte of struct tcp_info


class Gone(Exception):
    """The peer has left, or the stream to it was reset."""


# Seconds between two looks whether the last bytes have arrived.
_DELIVERY_CHECK: Final = 0.05


async def put(pipe: Pipe, data: bytes, gone: Callable[[], bool], look_every: float = 5.0) -> None:
    """Waits for room, as long as the client is there: that is looked at every so many seconds. Raises Gone."""
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
        """At least one byte; b"" when the peer sends no more. Raises Gone."""

    async def send(self, data: bytes) -> None:
        """Waits while the peer does not read. Raises Gone."""

    def gone(self) -> bool:
        """Whether the peer has left; works also while nothing is read."""


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
        """These bytes were received, and belong to whoever receives next."""
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
        """Read from the kernel: while a full pipe keeps us from reading, no end of input is seen."""
        if self._writer.transport.is_closing():
            return True
        sock = self._writer.get_extra_info("socket")
        try:
            return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED)
        except OSError:
            return True

    async def idle(self, seconds: float) -> None:
        """Returns when no byte has moved for so long."""
        while True:
            left = self.active_at + seconds - self._loop.time()
            if left <= 0:
                return
            await asyncio.sleep(left)

    async def delivered(self, seconds: float) -> None:
        """Returns when the peer's system has taken all that was sent, the peer has left, or after `seconds`: a user may
        look at the last page of output for a while."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.gone() and self._on_the_way():  # noqa: ASYNC110  the kernel tells of it nowhere else
                    await asyncio.sleep(_DELIVERY_CHECK)

    def _on_the_way(self) -> int:
        """Bytes. Raises OSError."""
        sock = self._writer.get_extra_info("socket")
        unacknowledged: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
        return unacknowledged + self._writer.transport.get_write_buffer_size()

    async def close(self, seconds: float) -> None:
        """Sends what waits, says so, and reads the peer's rest: a close with unread bytes would throw away what the peer
        has not read yet. After `seconds` the connection is cut."""
        with contextlib.suppress(OSError, TimeoutError):
            self._writer.transport.set_write_buffer_limits(high=0)  # drain() now waits for the last byte
            async with asyncio.timeout(seconds):
                await self._writer.drain()
                self._writer.write_eof()
                while await self._reader.read(PIECE):
                    pass
        self._writer.transport.abort()
