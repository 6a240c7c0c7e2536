"""Ends a download that is cancelled or makes no progress.

A thread that is blocked in a read cannot check an event, so a second thread does. If the pull is cancelled, stalls or runs out of
time, the second thread shuts the pull's sockets down, which wakes the readers at once. Several threads may read for one pull.
Each reads only from its own connections, so that some can be ended without the others.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from virtshim.model.errors import DeadlineExceeded, ShimError, Unavailable
from virtshim.model.image import PullProgress

_POLL_INTERVAL = 0.2


class PullWatch:
    """Guards one pull. A context manager. `progress_timeout`: the longest time without a byte, in seconds. `min_rate`: bytes per
    second required over such a time."""

    def __init__(self, name: str, cancelled: threading.Event, progress_timeout: float, min_rate: int = 0) -> None:
        self.name = name
        self._cancelled = cancelled
        self.progress_timeout = progress_timeout
        self.min_rate = min_rate
        self._end = float("inf")
        # Nanoseconds since the epoch; bytes to download, 0 while unknown; bytes received.
        self.began_at = time.time_ns()
        self.total = 0
        self.received = 0
        self._progressed_at = time.monotonic()
        self._failure: ShimError | None = None
        self._sockets: dict[socket.socket, threading.Thread] = {}
        self._ended: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="image-pull-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        for guarded in list(self._sockets):
            self.release(guarded)

    def limit(self, seconds: float) -> None:
        """The pull must end within `seconds` from now, or by an earlier limit."""
        self._end = min(self._end, time.monotonic() + seconds)

    def guard(self, connected: socket.socket) -> socket.socket:
        """Shuts this socket down when the pull, or this thread's part of it, must end. Returns the argument for `release`.
        Raises as `check` does; the caller must then close the socket."""
        own, guarded = threading.current_thread(), connected.dup()
        with self._lock:
            self._sockets[guarded] = own
        try:
            self.check()
        except ShimError:
            self.release(guarded)
            raise
        return guarded

    def release(self, guarded: socket.socket) -> None:
        """Ends the connection. While the socket is guarded, closing it elsewhere does not end the connection."""
        with self._lock:
            if self._sockets.pop(guarded, None) is not None:
                _shut_down(guarded)
                guarded.close()

    def progressed(self, count: int = 0) -> None:
        """Reports progress, and `count` bytes of the download. Raises as `check` does."""
        self._progressed_at = time.monotonic()
        with self._lock:
            self.received += count
        self.check()

    def silent_for(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._progressed_at

    def had(self, count: int) -> None:
        """Does not count `count` of the received bytes, because they had been received before."""
        with self._lock:
            self.received -= count

    def expect(self, total: int, received: int = 0) -> None:
        """The download has `total` bytes (0 if unknown), of which `received` are here already."""
        self.total, self.received = total, received

    def pause(self, seconds: float) -> None:
        """Waits, without counting as a stall. Raises as `check` does."""
        self._progressed_at = time.monotonic() + seconds
        self._cancelled.wait(seconds)
        self.check()

    def check(self) -> None:
        """Raises DeadlineExceeded if the pull was cancelled or its time is over, Unavailable if the source stalled, or if `cut`
        ended this thread."""
        if self._cancelled.is_set():
            self._failure = self._failure or self._cancellation()
        if self._failure is not None:
            raise self._failure
        if threading.current_thread() in self._ended:
            raise Unavailable(f"pull of image {self.name!r}: this part of it is no longer needed")

    def _watch(self) -> None:
        while not self._done.wait(_POLL_INTERVAL):
            self._failure = self._failure or self._reason_to_end(time.monotonic())
            if self._failure is not None:
                self._shut_down_sockets()

    def _reason_to_end(self, now: float) -> ShimError | None:
        if self._cancelled.is_set():
            return self._cancellation()
        if now >= self._end:
            return DeadlineExceeded(
                f"pull of image {self.name!r} took longer than images.pull_timeout, or its transport's timeout, allows"
            )
        if now - self._progressed_at > self.progress_timeout:
            return Unavailable(
                f"pull of image {self.name!r}: the source sent nothing for {self.progress_timeout:g} s; try again"
            )
        return None

    def _cancellation(self) -> ShimError:
        return DeadlineExceeded(f"pull of image {self.name!r} was cancelled by its caller")

    def cut(self, threads: Iterable[threading.Thread]) -> None:
        """Ends the connections of these threads, including those that they are about to open, but not the pull."""
        with self._lock:
            self._ended.update(threads)
            ended = [guarded for guarded, thread in self._sockets.items() if thread in self._ended]
        for guarded in ended:
            self.release(guarded)

    def _shut_down_sockets(self) -> None:
        with self._lock:
            for guarded in self._sockets:
                _shut_down(guarded)


def _shut_down(guarded: socket.socket) -> None:
    with contextlib.suppress(OSError):
        guarded.shutdown(socket.SHUT_RDWR)


class PullsUnderWay:
    """Thread-safe."""

    def __init__(self) -> None:
        self._watches: list[PullWatch] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def listed(self, watch: PullWatch) -> Iterator[None]:
        with self._lock:
            self._watches.append(watch)
        try:
            yield
        finally:
            with self._lock:
                self._watches.remove(watch)

    def progress(self) -> Sequence[PullProgress]:
        """The oldest first."""
        with self._lock:
            watches = list(self._watches)
        return [PullProgress(one.name, one.received, one.total, one.began_at) for one in watches]
