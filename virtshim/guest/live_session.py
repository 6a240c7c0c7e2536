"""A command that streams: its output is read, and its input written, while it runs. Implements
`virtshim.streaming.ports.StreamSession`."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import structlog

from virtshim.guest import exec_scripts
from virtshim.guest.command_output import MAX_RECORD
from virtshim.guest.exec_collector import VM_ENDED, SilenceTracker
from virtshim.guest.guest_exec import GuestVm, RunningCommand
from virtshim.guest.wait import CancellableDeadline
from virtshim.model.errors import ResourceExhausted, ShimError, Unavailable
from virtshim.streaming.ports import Ended, Output, OutStream
from virtshim.system.rate_limits import ReadPace

log = structlog.get_logger(__name__)

T = TypeVar("T")

_PIECE = 1 << 16
_SLICE = 0.25
_CHECK_SECONDS = 2.0
_RESIZE_SECONDS = 5.0
_CLOSE_SECONDS = 3.0


class LiveSession:
    def __init__(self, vm: GuestVm, running: RunningCommand, submit: Callable[..., Future[Any]]) -> None:
        """`submit` runs a call on a thread that may wait for this guest. Raises ResourceExhausted."""
        self._vm = vm
        self._running = running
        self._submit = submit
        self._pending: deque[Output] = deque()
        self._silence = SilenceTracker(time.monotonic(), vm.limits.silence)
        self._pace = ReadPace(time.monotonic())
        self._pause = 0.0
        self._input_over = asyncio.Event()
        self._broken: ShimError | None = None
        self._size: tuple[int, int] | None = None
        self._resizing: asyncio.Task[None] | None = None
        for end in self._ends():
            end.setblocking(False)
        if running.stdin is not None:
            running.stdin.setblocking(False)

    async def read(self) -> Output | Ended:
        output = self._running.output
        while not self._pending:
            if self._broken is not None:
                raise self._broken
            if output.complete or self._silence.over(time.monotonic()):
                if output.code is None:
                    raise self._running.lost()
                self._input_over.set()
                return Ended(output.code)
            if self._pause:
                await asyncio.sleep(self._pause)
                self._pause = 0.0
            await _ready(self._ends(), (), _SLICE)
            try:
                self._receive()
            except ShimError as exc:
                self._broken = exc  # reported after the output that arrived before
            await self._check()
        return self._pending.popleft()

    async def write_stdin(self, data: bytes) -> None:
        end = self._running.stdin
        self._pace.spoken_to(time.monotonic())
        rest = memoryview(data)
        while rest and end is not None and not self._input_over.is_set():
            try:
                rest = rest[end.send(rest[:_PIECE]) :]
            except BlockingIOError:
                await _ready((), (end,), _SLICE)
            except OSError:
                return  # nobody reads any more

    async def close_stdin(self) -> None:
        self._input_over.set()
        self._running.end_input()

    async def resize(self, width: int, height: int) -> None:
        if not (0 < width <= 0xFFFF and 0 < height <= 0xFFFF):
            return
        self._size = (height, width)
        self._start_resizing()

    async def close(self) -> None:
        self._input_over.set()
        if self._resizing is not None:
            self._resizing.cancel()
        output = self._running.output
        how = "" if output.complete else "relays" if output.exited else "all"
        settled, loop = asyncio.Event(), asyncio.get_running_loop()
        self._vm.reap(self._running, how, lambda: loop.call_soon_threadsafe(settled.set))
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await settled.wait()

    # ---

    def _ends(self) -> Iterable[socket.socket]:
        return self._running.outputs.values()

    def _receive(self) -> None:
        """The available output, up to one piece of each stream."""
        output = self._running.output
        for stream in tuple(self._running.outputs):
            data = self._received(stream)
            if data is None:
                continue
            if not data:
                raise Unavailable(VM_ENDED)
            self._pending.extend(output.feed(stream, data))
            now = time.monotonic()
            self._silence.heard(now, exited=output.exited)
            self._pause = self._pace.pause_after(len(data), now)
        if output.exited:  # the guest's `cat` waits for more to pass on
            self._input_over.set()
            self._running.end_input()
        if output.tty and self._size is not None:
            self._start_resizing()

    def _received(self, stream: OutStream) -> bytes | None:
        try:
            # Held-back bytes of the last piece are added.
            return self._running.outputs[stream].recv(_PIECE - MAX_RECORD)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise Unavailable(VM_ENDED) from exc

    async def _check(self) -> None:
        with suppress(ResourceExhausted):  # the guest has too many requests already; ask later
            due = self._silence.check_due(time.monotonic(), started=self._running.output.started)
            if due and await self._in_thread(self._is_gone):
                self._silence.gone(time.monotonic())
            if self._silence.turn_due(time.monotonic()):
                await self._in_thread(self._vm.run_noop)
                self._silence.turned(time.monotonic())

    def _is_gone(self) -> bool:
        try:
            return self._vm.is_gone(self._running, CancellableDeadline.after(_CHECK_SECONDS, patient=True))
        except ShimError:
            return False  # the guest may be busy; the command's own end will arrive

    def _start_resizing(self) -> None:
        if self._running.output.tty and (self._resizing is None or self._resizing.done()):
            self._resizing = asyncio.get_running_loop().create_task(self._resize())

    async def _resize(self) -> None:
        """Sets the newest size; sizes that arrive while one is being set are skipped."""
        while self._size is not None:
            (rows, columns), self._size = self._size, None
            words = (self._running.output.tty, str(rows), str(columns))
            deadline = CancellableDeadline.after(_RESIZE_SECONDS, patient=True)
            try:
                await self._in_thread(partial(self._vm.run_script, exec_scripts.RESIZE, words, deadline))
            except ShimError as exc:
                log.info("exec.resize.failed", error=str(exc))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        done: T = await asyncio.wrap_future(self._submit(call))
        return done


async def _ready(readers: Iterable[socket.socket], writers: Iterable[socket.socket], seconds: float) -> None:
    """Returns when one of them is done, or after that time."""
    loop = asyncio.get_running_loop()
    wake = asyncio.Event()
    readers, writers = tuple(readers), tuple(writers)
    for end in readers:
        loop.add_reader(end, wake.set)
    for end in writers:
        loop.add_writer(end, wake.set)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await wake.wait()
    finally:
        for end in readers:
            loop.remove_reader(end)
        for end in writers:
            loop.remove_writer(end)
