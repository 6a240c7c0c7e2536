"""A token bucket: how much may be written at once, and how much per second after that; and how often may be read."""

from __future__ import annotations

from typing import Final

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
