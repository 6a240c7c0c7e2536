"""Limits of rates: bytes written, small reads, and repeated log messages."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from typing import Final

import structlog

# What a container may add to its CRI log, in bytes per second and at once. kubelet checks every 10 s whether to rotate a log and
# keeps five, which limits a log directory at this rate.
LOG_RATE: Final = 16 << 20
LOG_BURST: Final = 64 << 20


class TokenBucket:
    """Allows `rate` bytes a second, and saves unused ones up to `burst`. It may be overdrawn, and `wait` says for how long
    to pause. Times are seconds of a monotonic clock."""

    __slots__ = ("_at", "_burst", "_left", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at = now

    def spend(self, size: int, now: float) -> None:
        self._left = self._saved(now) - size
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until something may be written; 0 for now."""
        return max(0.0, -self._saved(now) / self._rate)

    def _saved(self, now: float) -> float:
        return min(self._burst, self._left + (now - self._at) * self._rate)


# Small reads per second, and at once. After these, a read waits for more bytes, which nobody notices in typed input or in a
# program's progress.
_CRUMBS: Final = 200
_CRUMBS_AT_ONCE: Final = 1000
_FEW: Final = 16 << 10
_ANSWER: Final = 4


class ReadPace:
    """The pace of reads from a guest, because reading a single byte costs as much as a whole page."""

    __slots__ = ("_bucket",)

    def __init__(self, now: float, per_second: float = _CRUMBS, at_once: float = _CRUMBS_AT_ONCE) -> None:
        self._bucket = TokenBucket(per_second, at_once, now)

    def pause_after(self, size: int, now: float) -> float:
        """Seconds to wait before the next read, after one of `size` bytes; mostly 0."""
        if size < _FEW:
            self._bucket.spend(1, now)
        return self._bucket.wait(now)

    def spoken_to(self, now: float) -> None:
        """Something was sent to the guest, so a few reads of its answer are free."""
        self._bucket.spend(-_ANSWER, now)


class TroubleLog:
    """Logs repeated trouble once when it begins, and once when it is over. `over`: the event of its end. Thread-safe."""

    def __init__(self, log: structlog.stdlib.BoundLogger, over: str) -> None:
        self._log = log
        self._over = over
        self._lock = threading.Lock()
        self._present: dict[Hashable, str] = {}

    def met(self, event: str, key: Hashable = None, **facts: object) -> None:
        """`key`: what is in trouble, if there may be several. A different `event` is different trouble."""
        with self._lock:
            new = self._present.get(key) != event
            self._present[key] = event
        if new:
            self._log.warning(event, **facts)

    def over(self, key: Hashable = None, **facts: object) -> None:
        """Does nothing if there was no trouble."""
        with self._lock:
            was = self._present.pop(key, None)
        if was is not None:
            self._log.info(self._over, **facts)

    def retain_only(self, keys: Iterable[Hashable]) -> None:
        """Forgets all other keys."""
        with self._lock:
            known = set(keys) if self._present else set()
            self._present = {key: event for key, event in self._present.items() if key in known}
