"""Trouble that is met again and again: logged when it begins and when it is over, not each time."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from typing import Final

import structlog

# A token bucket: how much may be written at once, and how much per second after that; and how often may be read.

# What one container may add to its CRI log, in bytes a second and in bytes at once. kubelet looks every 10 s whether a log
# is to be rotated, and keeps five: a log directory is full at this pace or never.
LOG_RATE: Final = 16 << 20
LOG_BURST: Final = 64 << 20


class TokenBucket:
    """`rate` bytes a second; what was not used is saved, up to `burst` bytes. It may be overdrawn; `wait` waits that off.
    Times are of a monotonic clock, in seconds."""

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


# Reads of few bytes: a second, and at once. After these a read waits until more has gathered: to somebody who types, or a
# program that tells its progress, that makes no difference.
_CRUMBS: Final = 200
_CRUMBS_AT_ONCE: Final = 1000
_FEW: Final = 16 << 10
_ANSWER: Final = 4


class ReadPace:
    """Of one connection to a guest: what it says a byte at a time is as much work, byte by byte, as whole pages."""

    __slots__ = ("_bucket",)

    def __init__(self, now: float, per_second: float = _CRUMBS, at_once: float = _CRUMBS_AT_ONCE) -> None:
        self._bucket = TokenBucket(per_second, at_once, now)

    def pause_after(self, size: int, now: float) -> float:
        """Seconds to wait before the next read, after one of `size` bytes; mostly 0."""
        if size < _FEW:
            self._bucket.spend(1, now)
        return self._bucket.wait(now)

    def spoken_to(self, now: float) -> None:
        """The guest was sent something: a few reads of its answer are free."""
        self._bucket.spend(-_ANSWER, now)


class TroubleLog:
    """`over`: the event that tells its end. Thread-safe."""

    def __init__(self, log: structlog.stdlib.BoundLogger, over: str) -> None:
        self._log = log
        self._over = over
        self._lock = threading.Lock()
        self._present: dict[Hashable, str] = {}

    def met(self, event: str, key: Hashable = None, **facts: object) -> None:
        """`key` says what is in trouble, where that may be several; a different `event` is different trouble."""
        with self._lock:
            new = self._present.get(key) != event
            self._present[key] = event
        if new:
            self._log.warning(event, **facts)

    def over(self, key: Hashable = None, **facts: object) -> None:
        """Nothing happens if there was none."""
        with self._lock:
            was = self._present.pop(key, None)
        if was is not None:
            self._log.info(self._over, **facts)

    def retain_only(self, keys: Iterable[Hashable]) -> None:
        """Forgets what does not exist any more."""
        with self._lock:
            known = set(keys) if self._present else set()
            self._present = {key: event for key, event in self._present.items() if key in known}
