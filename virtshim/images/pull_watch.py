"""Ends a download that nobody waits for or that does not move.

A thread that is blocked in a read cannot look at an event, so a second one does: when the pull is cancelled, makes no
progress or has used up its time, it shuts the pull's sockets down, which wakes the reader at once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

from virtshim.domain.errors import DeadlineExceeded, ShimError, Unavailable

_POLL_INTERVAL = 0.2


class PullWatch:
    """Guards one pull; a context manager. Times are in seconds; `progress_timeout` is the longest time without a byte,
    `min_rate` how many a second have to come in such a time."""

    def __init__(self, name: str, cancelled: threading.Event, progress_timeout: float, min_rate: int = 0) -> None:
        self.name = name
        self._cancelled = cancelled
        self.progress_timeout = progress_timeout
        self.min_rate = min_rate
        self._end = float("inf")
        # Nanoseconds since the epoch; bytes of what is downloaded, 0 while that is not known; and those that are here.
        self.began_at = time.time_ns()
        self.total = 0
        self.received = 0
        self._progressed_at = time.monotonic()
        self._failure: ShimError | None = None
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="image-pull-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        with self._lock:
            for guarded in self._sockets:
                guarded.close()
            self._sockets.clear()

    def limit(self, seconds: float) -> None:
        """From now on the pull may take that long in all, or as long as was said before if that is shorter."""
        self._end = min(self._end, time.monotonic() + seconds)

    def guard(self, connected: socket.socket) -> None:
        """This socket is shut down when the pull must end."""
        with self._lock:
            self._sockets.append(connected.dup())
        self.check()

    def progressed(self, count: int = 0) -> None:
        """Bytes arrived, `count` of them of what is downloaded. Raises like `check`."""
        self._progressed_at = time.monotonic()
        with self._lock:
            self.received += count
        self.check()

    def expect(self, total: int, received: int = 0) -> None:
        """What is downloaded has that many bytes in all, of which so many are here; 0: nobody says."""
        self.total, self.received = total, received

    def pause(self, seconds: float) -> None:
        """Waits that long, which is no lack of progress. Raises like `check`."""
        self._progressed_at = time.monotonic() + seconds
        self._cancelled.wait(seconds)
        self.check()

    def check(self) -> None:
        """Raises DeadlineExceeded if the caller gave up or the time is over, Unavailable if the source stalled."""
        if self._cancelled.is_set():
            self._failure = self._failure or self._given_up()
        if self._failure is not None:
            raise self._failure

    def _watch(self) -> None:
        while not self._done.wait(_POLL_INTERVAL):
            self._failure = self._failure or self._reason_to_end(time.monotonic())
            if self._failure is not None:
                self._shut_down_sockets()

    def _reason_to_end(self, now: float) -> ShimError | None:
        if self._cancelled.is_set():
            return self._given_up()
        if now >= self._end:
            return DeadlineExceeded(
                f"pull of image {self.name!r} took longer than images.pull_timeout, or its transport's timeout, allows"
            )
        if now - self._progressed_at > self.progress_timeout:
            return Unavailable(
                f"pull of image {self.name!r}: the source sent nothing for {self.progress_timeout:g} s; try again"
            )
        return None

    def _given_up(self) -> ShimError:
        return DeadlineExceeded(f"pull of image {self.name!r} was given up by its caller")

    def cut(self) -> None:
        """Ends all that is being read, but not the pull."""
        self._shut_down_sockets()
        with self._lock:
            for guarded in self._sockets:
                guarded.close()
            self._sockets.clear()

    def _shut_down_sockets(self) -> None:
        with self._lock:
            for guarded in self._sockets:
                with contextlib.suppress(OSError):
                    guarded.shutdown(socket.SHUT_RDWR)
