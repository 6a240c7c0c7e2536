"""The client's connection as a bounded two-way channel of bytes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from typing import Final, Protocol

from virtshim.streaming.pipe import Pipe

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
