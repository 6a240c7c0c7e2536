"""Attach: the serial consoles' sockets, shared by all clients of a VM. Lives on the streaming loop.

QEMU serves one connection for each console, so all clients of a VM share one. The connection exists only while a client
is attached. All clients get the output. virtshim always reads QEMU's output within milliseconds, because a full socket
would stop the guest's UART. A client that does not keep up loses its oldest bytes, and a message says so. Input of all
clients goes to the guest as it arrives. A serial line is not a pipe: the guest echoes input, and there is no end of
input.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import struct
import termios
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog

from virtshim.model.errors import ResourceExhausted, ShimError, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.streaming.ports import Attaches, AttachStreams, Ended, Output, OutStream, StreamSession
from virtshim.system.rate_limits import ReadPace

# The choice between both kinds of attach, their limits, and the messages about these limits.

MAX_CLIENTS: Final = 16
# Bytes that may wait for one client, and for all clients of one VM.
MAX_WAITING: Final = 1 << 20
_WAITING_OF_VM: Final = 4 << 20


class Attachments:
    """Attaches to a container's entrypoint, or to its console. Implements `virtshim.streaming.ports.Attaches`."""

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
    """The bytes that may wait for each of that many clients."""
    return min(MAX_WAITING, _WAITING_OF_VM // max(1, clients))


def bytes_lost(count: int) -> Output:
    """The message that replaces output that a client did not read in time."""
    return Output(OutStream.STDOUT, f"\r\n[virtshim: {count} bytes lost: this client reads too slowly]\r\n".encode())


# Sets the size of guests' consoles to that of their clients: the newest wins, one at a time, without blocking.
#
# A serial line cannot carry a size, so it goes by the guest's agent. A guest without one keeps the size that it has.

log = structlog.get_logger(__name__)

# Container, columns, rows, seconds. Blocks; raises ShimError.
SetSize = Callable[[ContainerId, int, int, float], None]

# Seconds for the agent, and between two sizes of one console: dragging a window makes many sizes.
_ANSWER: Final = 3.0
_PAUSE: Final = 0.3
_MAX: Final = 0xFFFF
# The number of guests whose size is set at the same time, each on its own thread, so that a silent guest delays no
# other.
_THREADS: Final = 512


class ConsoleSizes:
    """The sizes of all consoles."""

    def __init__(self, tell: SetSize) -> None:
        self._set = tell
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="console-size")

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def size(self, container: ContainerId) -> ConsoleSize:
        return ConsoleSize(lambda columns, rows: self._set_size(container, columns, rows), self._executor)

    def _set_size(self, container: ContainerId, columns: int, rows: int) -> None:
        try:
            self._set(container, columns, rows, _ANSWER)
        except ShimError as exc:
            log.debug("console.size.not_set", container=container.short, why=str(exc))


class ConsoleSize:
    """The size of one console. Runs on the streaming loop."""

    def __init__(self, tell: Callable[[int, int], None], executor: ThreadPoolExecutor) -> None:
        self._set = tell
        self._executor = executor
        self._newest: tuple[int, int] | None = None
        self._setting: asyncio.Task[None] | None = None

    def change(self, columns: int, rows: int) -> None:
        """Returns at once. Impossible sizes are ignored."""
        if not (0 < columns <= _MAX and 0 < rows <= _MAX):
            return
        self._newest = (columns, rows)
        if self._setting is None or self._setting.done():
            self._setting = asyncio.get_running_loop().create_task(self._set_newest())

    def close(self) -> None:
        if self._setting is not None:
            self._setting.cancel()

    async def _set_newest(self) -> None:
        while self._newest is not None:
            size, self._newest = self._newest, None
            await asyncio.get_running_loop().run_in_executor(self._executor, self._set, *size)
            await asyncio.sleep(_PAUSE)


# Bytes in one read from QEMU, and in one message to a client.
_PIECE: Final = 64 << 10

# Bytes of input that may wait for QEMU, which takes input as fast as the guest reads its UART.
_INPUT: Final = 4 << 10

_CONNECT: Final = 5.0

# Seconds for QEMU to read the last client's input, because QEMU drops unread input when the connection closes.
_LAST_INPUT: Final = 2.0
_LOOK: Final = 0.02


class ConsoleAttach:
    """Implements `virtshim.streaming.ports.Attaches`."""

    def __init__(self, layout: Layout, sizes: ConsoleSizes) -> None:
        self._layout = layout
        self._sizes = sizes
        self._lines: dict[ContainerId, _Line] = {}
        self._input_over: set[ContainerId] = set()

    @property
    def connected(self) -> Collection[ContainerId]:
        """The VMs with an open connection to their console."""
        return self._lines.keys()

    async def attach(self, request: AttachStreams) -> ConsoleSession:
        """Raises Unavailable, WrongState, ResourceExhausted."""
        container = request.container
        if request.streams.stdin and self._is_input_over(container):
            raise input_ended(container)
        while True:
            line = self._lines.setdefault(
                container, _Line(self._layout.console_socket(container), self._sizes.size(container))
            )
            async with line.lock:
                if self._lines.get(container) is not line:
                    continue  # the last client left while we waited
                try:
                    return await self._joined(line, request)
                finally:
                    if not line.is_open:
                        del self._lines[container]

    async def _joined(self, line: _Line, request: AttachStreams) -> ConsoleSession:
        if len(line.members) >= MAX_CLIENTS:
            raise too_many_clients(request.container)
        if line.over:
            raise Unavailable("the VM's console cannot be reached: the VM has ended")
        if not line.is_open:
            await line.connect()
        session = ConsoleSession(self, line, request)
        line.members.add(session)
        return session

    async def left(self, session: ConsoleSession, line: _Line, container: ContainerId) -> None:
        """Removes a client. The last client closes the line."""
        line.members.discard(session)
        async with line.lock:
            if line.members or self._lines.get(container) is not line:
                return
            try:
                await line.close()
            finally:
                del self._lines[container]

    def input_is_over(self, container: ContainerId) -> None:
        self._input_over.add(container)

    def _is_input_over(self, container: ContainerId) -> bool:
        """Whether a stdinOnce console's input has ended. Also forgets VMs that are gone."""
        self._input_over = {c for c in self._input_over if os.path.exists(self._layout.console_socket(c))}
        return container in self._input_over


class _Line:
    """The connection to one VM's console."""

    def __init__(self, path: str, size: ConsoleSize) -> None:
        self._path = path
        self.size = size
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pump: asyncio.Task[None] | None = None
        self.over = False
        self.lock = asyncio.Lock()
        self.members: set[ConsoleSession] = set()

    @property
    def is_open(self) -> bool:
        """Whether the line is open. It still is while the last client leaves."""
        return self._writer is not None

    async def connect(self) -> None:
        """Raises Unavailable."""
        try:
            async with asyncio.timeout(_CONNECT):
                self._reader, self._writer = await asyncio.open_unix_connection(self._path, limit=_PIECE)
        except TimeoutError as exc:
            raise Unavailable("the VM's console does not answer: another program may have it open") from exc
        except OSError as exc:
            gone = exc.errno in (errno.ENOENT, errno.ECONNREFUSED)
            why = "the VM has ended" if gone else exc.strerror
            raise Unavailable(f"the VM's console cannot be reached: {why}") from exc
        self._writer.transport.set_write_buffer_limits(high=_INPUT)
        self._pump = asyncio.create_task(self._fan_out(self._reader, self._writer.transport))

    async def _fan_out(self, reader: asyncio.StreamReader, transport: asyncio.WriteTransport) -> None:
        """Passes output to all clients. QEMU sends each byte of the UART separately, so when many arrive, this waits
        until more are in the socket."""
        assert isinstance(transport, asyncio.Transport)
        now = asyncio.get_running_loop().time
        pace = ReadPace(now())
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE):
                room = room_for_each(len(self.members))
                for member in self.members:
                    member.take(data, room)
                pause = pace.pause_after(len(data), now())
                if pause:
                    transport.pause_reading()
                # A guest that prints without end must not keep its readers from their turn.
                await asyncio.sleep(pause)
                if pause:
                    transport.resume_reading()
        self.over = True
        for member in self.members:
            member.end()

    async def type(self, data: bytes) -> None:
        """Sends input, and waits until the guest takes it. Does nothing if the VM has ended."""
        assert self._writer is not None  # connected before the first member
        with contextlib.suppress(OSError):
            for at in range(0, len(data), _INPUT):
                self._writer.write(data[at : at + _INPUT])
                await self._writer.drain()

    async def close(self) -> None:
        self.size.close()
        if self._writer is not None:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_LAST_INPUT):
                    await self._input_taken(self._writer)
            self._writer.transport.abort()
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)

    @staticmethod
    async def _input_taken(writer: asyncio.StreamWriter) -> None:
        """Returns when QEMU has read all input. Raises OSError."""
        while not writer.transport.is_closing():
            waiting = fcntl.ioctl(writer.get_extra_info("socket").fileno(), termios.TIOCOUTQ, b"\0" * 4)
            if struct.unpack("i", waiting)[0] == 0 and writer.transport.get_write_buffer_size() == 0:
                return
            await asyncio.sleep(_LOOK)


class ConsoleSession:
    """The session of one client. Implements `virtshim.streaming.ports.StreamSession`."""

    def __init__(self, hub: ConsoleAttach, line: _Line, request: AttachStreams) -> None:
        self._hub = hub
        self._line = line
        self._request = request
        self._waiting = bytearray()
        self._lost = 0
        self._ended = False
        self._changed = asyncio.Event()

    # --- from the line

    def take(self, data: bytes, room: int) -> None:
        """Adds output for the client. If more than `room` bytes wait, drops the oldest."""
        if not self._request.streams.stdout:
            return
        self._waiting += data
        if (too_many := len(self._waiting) - room) > 0:
            del self._waiting[:too_many]
            self._lost += too_many
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    # --- virtshim.streaming.ports.StreamSession

    async def read(self) -> Output | Ended:
        while not (self._waiting or self._lost or self._ended):
            self._changed.clear()
            await self._changed.wait()
        if self._lost:
            lost, self._lost = self._lost, 0
            return bytes_lost(lost)
        if self._waiting:
            data = bytes(self._waiting[:_PIECE])
            del self._waiting[: len(data)]
            return Output(OutStream.STDOUT, data)
        return Ended(0)

    async def write_stdin(self, data: bytes) -> None:
        if self._request.streams.stdin:
            await self._line.type(data)

    async def close_stdin(self) -> None:
        """A serial line has no end of input, so the next client may type, unless the pod has stdinOnce. See
        `AttachStreams.leaves_with_input`."""
        if self._request.streams.stdin and self._request.stdin_once:
            self._hub.input_is_over(self._request.container)
        if self._request.leaves_with_input:
            self.end()

    async def resize(self, width: int, height: int) -> None:
        """Sets the console's size. All clients share one console, so the newest size applies to all."""
        if self._request.streams.tty:
            self._line.size.change(width, height)

    async def close(self) -> None:
        await self.close_stdin()
        await self._hub.left(self, self._line, self._request.container)
