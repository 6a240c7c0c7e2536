"""Follows all consoles of the node on one thread."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
from collections.abc import Callable
from typing import Final

import structlog

from virtshim.logs.files import LogFile, RawLog
from virtshim.logs.tail import Pace, Tail, Turn
from virtshim.logs.watch import RawLogWatch
from virtshim.model.errors import Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.system.clock import Clock
from virtshim.system.threads import lasting

# A console without a CRI log. Only the last part of its raw log is kept, for administrators. Thread-safe.

log = structlog.get_logger(__name__)

# At least so many bytes are kept, and at most one MiB more, because space is freed in pieces of one MiB.
KEEP_BYTES: Final = 16 * 1024 * 1024


class RawTail:
    """Has the same methods as Tail. The file keeps its length, because freed space reads as zeros."""

    def __init__(self, container: ContainerId, raw_path: str) -> None:
        self._container = container
        self._raw = RawLog(raw_path)
        self._lock = threading.Lock()
        self._failing = False
        self._closed = False

    @property
    def raw_path(self) -> str:
        return self._raw.path

    @property
    def is_closed(self) -> bool:
        return self._closed

    def turn(self) -> Turn:
        with self._lock:
            if not self._closed:
                self._trim()
        return Turn()

    def reopen(self) -> None:
        """Does nothing, because there is no log that could be renamed."""

    def note(self, line: str) -> None:
        """Does nothing, because there is no log to write to."""

    def finish(self) -> None:
        """Frees space for the last time, and closes the raw log."""
        with self._lock, contextlib.ExitStack() as last:
            last.callback(self._close)
            if not self._closed:
                self._trim()

    def close(self) -> None:
        """Closes the raw log. A later RawTail continues."""
        with self._lock:
            self._close()

    # --- below: with the lock held --------------------------------------------------------------------------------------

    def _trim(self) -> None:
        try:
            if self._raw.open():
                self._raw.free_before(self._raw.status().st_size - KEEP_BYTES)
                if self._raw.status().st_nlink == 0:
                    self._raw.close()
            self._failing = False
        except OSError as error:
            if not self._failing:  # logged once, however often it is tried again
                log.warning("console.raw.failed", container=self._container.short, error=str(error))
            self._failing = True

    def _close(self) -> None:
        self._closed = True
        self._raw.close()


_CLOSE_TIMEOUT: Final = 10.0


class ConsoleLogs:
    """Implements Consoles. All methods may be called from any thread.

    The thread works in rounds. In each round every console with new output has one turn of bounded size, so that no
    console waits for another's flood. Only the thread uses the attributes from `_ready` on; `_lock` guards the others.
    """

    def __init__(self, layout: Layout, clock: Clock, pace: Pace | None = None) -> None:
        self._layout = layout
        self._clock = clock
        self._pace = pace or Pace()
        self._opening = threading.Lock()
        self._stopping = threading.Event()
        self._on_news: Callable[[ContainerId], None] = lambda _container: None
        self._lock = threading.Lock()
        self._tails: dict[ContainerId, Tail | RawTail] = {}
        self._arrived: list[ContainerId] = []
        self._gone: list[ContainerId] = []
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ready: dict[ContainerId, None] = {}  # in the order of their turns
        self._due: dict[ContainerId, float] = {}
        self._swept_at = clock.monotonic()
        self._watch = RawLogWatch()
        self._thread = lasting(self._follow, "consoles")

    def open(self, container: ContainerId, log_file: str, log_directory: str = "") -> None:
        """Errors: InvalidRequest (path not absolute, a symbolic link, not a regular file), ResourceExhausted,
        InternalError, Unavailable (closed)."""
        with self._opening:  # two openings of one console would cut back each other's lines
            with self._lock:
                known = self._tails.get(container)
            if known is not None and not known.is_closed:
                return
            tail = self._opened(container, log_file, log_directory)
            with self._lock:
                if not self._stopping.is_set():
                    self._tails[container] = tail
                    self._arrived.append(container)
                    os.eventfd_write(self._wake, 1)
                    return
            tail.close()
            raise Unavailable("consoles are closed: the service is stopping")

    def _opened(self, container: ContainerId, log_file: str, log_directory: str) -> Tail | RawTail:
        if not log_file:
            return RawTail(container, self._layout.console_log(container))
        log = LogFile.open(log_file, log_directory)
        return Tail.open(container, log, self._layout, self._clock, self._pace)

    def reopen(self, container: ContainerId) -> None:
        """Errors as of `open`."""
        with self._lock:
            tail = self._tails.get(container)
        if tail is None:
            raise WrongState(f"the console of container {container} is not followed, so its log cannot be reopened")
        tail.reopen()

    def note(self, container: ContainerId, line: str) -> None:
        with self._lock:
            tail = self._tails.get(container)
        if tail is None:
            raise WrongState(f"the console of container {container} is not followed, so nothing is added to its log")
        tail.note(line)

    def finish(self, container: ContainerId) -> None:
        """A log that cannot be written is reported in our log, not to the caller."""
        with self._lock:
            tail = self._tails.get(container)
        if tail is None:
            return
        tail.finish()
        with self._lock:
            if self._tails.get(container) is tail:
                del self._tails[container]
                self._gone.append(container)

    def on_news(self, callback: Callable[[ContainerId], None]) -> None:
        self._on_news = callback

    def close(self) -> None:
        """Stops following. Nothing is lost, because `open` in a later process continues. May be called twice."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
            os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_TIMEOUT)
        if not self._thread.is_alive():
            os.close(self._wake)
        with self._lock:
            tails, self._tails = list(self._tails.values()), {}
        for tail in tails:
            tail.close()

    # --- below: the thread ----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self._watch.descriptor is not None:
            poller.register(self._watch.descriptor, select.POLLIN)
        try:
            while not self._stopping.is_set():
                began = self._clock.monotonic()
                try:
                    self._wait(poller)
                    began = self._clock.monotonic()
                    self._gather()
                    self._round()
                except Exception:  # the edge of the thread: the next round must come
                    log.exception("console.round.failed")
                    self._clock.wait(self._stopping, self._pace.retry_after)
                # However many consoles are flooded, this thread works half of the time at most.
                self._clock.wait(self._stopping, max(self._pace.gap, self._clock.monotonic() - began))
        finally:
            self._watch.close()

    def _wait(self, poller: select.poll) -> None:
        """Waits until a console has new output, or something is due."""
        wake_at = min([self._sweep_at(), *self._due.values()])
        seconds = 0.0 if self._ready else max(0.0, wake_at - self._clock.monotonic())
        poller.poll(math.ceil(seconds * 1000))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _sweep_at(self) -> float:
        every = self._pace.sweep_unwatched_every if self._watch.has_unwatched else self._pace.sweep_every
        return self._swept_at + every

    def _gather(self) -> None:
        """Adds the consoles that have a turn in the next round to `_ready`."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            gone, self._gone = self._gone, []
        for container in gone:
            self._watch.drop(container)
            self._due.pop(container, None)
        now = self._clock.monotonic()
        reported = self._watch.reported()
        if reported is None or now >= self._sweep_at():
            self._swept_at = now
            with self._lock:
                reported = set(self._tails)
        news = [*arrived, *reported, *(container for container, due in self._due.items() if due <= now)]
        self._ready.update(dict.fromkeys(news))

    def _round(self) -> None:
        ready, self._ready = self._ready, {}
        for container in ready:
            if self._stopping.is_set():
                return
            with self._lock:
                tail = self._tails.get(container)
            if tail is not None:
                self._give_turn(container, tail)

    def _give_turn(self, container: ContainerId, tail: Tail | RawTail) -> None:
        self._due.pop(container, None)
        try:
            self._watch.ensure_watched(container, tail.raw_path)
            turn = tail.turn()
            self._on_news(container)
        except Exception:  # the edge of the thread: one console must not stop the others
            log.exception("console.turn.failed", container=container.short)
            self._due[container] = self._clock.monotonic() + self._pace.retry_after
            return
        if turn.more:
            self._ready[container] = None
        if turn.due is not None:
            self._due[container] = turn.due
