"""Attaches clients to a container's entrypoint. All clients get its output, and its input is what they type. Runs on
the streaming loop, except for the methods that the command's thread calls (`virtshim.guest.ports.EntrypointListeners`).
Clients get the same output as the log, at the time when virtshim reads it from the guest. They do not get earlier
output. A client that does not keep up loses its oldest output, and a message says so. The command never waits for a
client.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

import structlog

from virtshim.attach.console import (
    MAX_CLIENTS,
    MAX_WAITING,
    ConsoleSize,
    ConsoleSizes,
    bytes_lost,
    input_ended,
    room_for_each,
    too_many_clients,
)
from virtshim.guest.ports import EntrypointInputs
from virtshim.model.errors import ShimError
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import AttachStreams, Ended, Output, OutStream, StreamSession

log = structlog.get_logger(__name__)

# Seconds for the last input to reach the command, and for telling the guest that no more input follows.
_LAST_INPUT: Final = 2.0
_ANSWER: Final = 3.0


class EntrypointAttach:
    """Implements `virtshim.streaming.ports.Attaches` and `virtshim.guest.ports.EntrypointListeners`."""

    def __init__(self, inputs: EntrypointInputs) -> None:
        self.inputs = inputs
        self._sizes = ConsoleSizes(inputs.resize)
        self._lock = threading.Lock()
        self._sessions: dict[ContainerId, list[EntrypointSession]] = {}
        self._input_over: set[ContainerId] = set()

    def close(self) -> None:
        self._sizes.close()

    # --- virtshim.streaming.ports.Attaches

    async def attach(self, request: AttachStreams) -> EntrypointSession:
        """Raises WrongState, ResourceExhausted."""
        container = request.container
        session = EntrypointSession(self, request, self._sizes.size(container))
        with self._lock:
            if request.streams.stdin and container in self._input_over:
                raise input_ended(container)
            others = self._sessions.setdefault(container, [])
            if len(others) >= MAX_CLIENTS:
                raise too_many_clients(container)
            others.append(session)
        return session

    def left(self, session: EntrypointSession, container: ContainerId) -> None:
        with self._lock:
            others = self._sessions.get(container, [])
            if session in others:
                others.remove(session)
            if not others:
                self._sessions.pop(container, None)

    def input_is_over(self, container: ContainerId) -> None:
        with self._lock:
            self._input_over.add(container)

    # --- virtshim.guest.ports.EntrypointListeners: any thread

    def has_clients(self, container: ContainerId) -> bool:
        with self._lock:
            return container in self._sessions

    def publish(self, container: ContainerId, output: Sequence[Output]) -> None:
        with self._lock:
            sessions = tuple(self._sessions.get(container, ()))
        for session in sessions:
            session.hear(output, room_for_each(len(sessions)))

    def ended(self, container: ContainerId, code: int) -> None:
        with self._lock:
            sessions = tuple(self._sessions.get(container, ()))
        for session in sessions:
            session.end(code)

    def forget(self, container: ContainerId) -> None:
        """Forgets the container. The streaming server ends its sessions."""
        with self._lock:
            self._input_over.discard(container)


class EntrypointSession:
    """One client's share. Implements `virtshim.streaming.ports.StreamSession`."""

    def __init__(self, hub: EntrypointAttach, request: AttachStreams, size: ConsoleSize) -> None:
        self._hub = hub
        self._request = request
        self._size = size
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Output] = deque()
        self._held = 0
        self._lost = 0
        self._code: int | None = None
        self._changed = asyncio.Event()
        self._input: StreamSession | None = None
        self._input_over = not request.streams.stdin
        self._input_lock = asyncio.Lock()

    # --- from the command's thread

    def hear(self, output: Sequence[Output], room: int) -> None:
        """Adds output for the client. If more than `room` bytes wait, drops the oldest."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take, output, room)

    def end(self, code: int) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, code)

    def _take(self, output: Sequence[Output], room: int = MAX_WAITING) -> None:
        wanted = self._request.streams
        for piece in output:
            # A terminal has one output.
            if wanted.stdout if piece.stream is OutStream.STDOUT or wanted.tty else wanted.stderr:
                self._waiting.append(Output(OutStream.STDOUT, piece.data) if wanted.tty else piece)
                self._held += len(piece.data)
        while self._held > room and len(self._waiting) > 1:
            oldest = len(self._waiting.popleft().data)
            self._held -= oldest
            self._lost += oldest
        self._changed.set()

    def _end(self, code: int) -> None:
        self._code = code
        self._changed.set()

    # --- virtshim.streaming.ports.StreamSession

    async def read(self) -> Output | Ended:
        while not (self._waiting or self._lost or self._code is not None):
            self._changed.clear()
            await self._changed.wait()
        if self._lost:
            lost, self._lost = self._lost, 0
            return bytes_lost(lost)
        if self._waiting:
            piece = self._waiting.popleft()
            self._held -= len(piece.data)
            return piece
        assert self._code is not None  # the loop above
        return Ended(self._code)

    async def write_stdin(self, data: bytes) -> None:
        """The first call opens the input. If the guest cannot open it, discards the input and sends the client a
        message."""
        async with self._input_lock:
            if self._input_over:
                return
            try:
                if self._input is None:
                    self._input = await self._hub.inputs.open(self._request.container)
                await self._input.write_stdin(data)
            except ShimError as exc:
                self._input_over = True
                why = f"\r\n[virtshim: input does not reach the command: {exc}]\r\n"
                self._take([Output(OutStream.STDOUT, why.encode())])

    async def close_stdin(self) -> None:
        """The next client may type, unless the pod has stdinOnce: then the command reads the end of its input. See
        `AttachStreams.leaves_with_input`."""
        await self._end_input()
        if self._request.leaves_with_input and self._code is None:
            self._end(0)

    async def _end_input(self) -> None:
        async with self._input_lock:
            if self._input_over:
                return
            self._input_over = True
            if self._request.stdin_once:
                self._hub.input_is_over(self._request.container)
            with contextlib.suppress(ShimError, TimeoutError):
                await self._input_delivered()
            if self._request.stdin_once:
                await self._loop.run_in_executor(None, self._send_end_of_input)

    async def resize(self, width: int, height: int) -> None:
        if self._request.streams.tty:
            self._size.change(width, height)

    async def close(self) -> None:
        self._hub.left(self, self._request.container)
        self._size.close()
        await self.close_stdin()
        if self._input is not None:
            await self._input.close()

    async def _input_delivered(self) -> None:
        """Returns when the command has received all input. Raises ShimError, TimeoutError."""
        if self._input is None:
            return
        async with asyncio.timeout(_LAST_INPUT):
            await self._input.close_stdin()
            while not isinstance(await self._input.read(), Ended):
                pass

    def _send_end_of_input(self) -> None:
        try:
            self._hub.inputs.end(self._request.container, _ANSWER)
        except ShimError as exc:
            log.info("command.input.not_ended", container=self._request.container.short, why=str(exc))
