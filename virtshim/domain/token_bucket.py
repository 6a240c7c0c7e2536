"""A token bucket: how much may be written at once, and how much per second after that."""

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
