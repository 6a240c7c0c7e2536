"""The system's clock, and unique time stamps."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Wall clock, nanoseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds of a clock that never jumps."""

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """True if the event was set within that time."""


class SystemClock:
    """Implements `virtshim.system.clock.Clock`."""

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)


class Stamps:
    """Creation times, by which kubelet orders sandboxes and containers. They always increase, even if the wall clock is set
    back."""

    def __init__(self, clock: Clock, last: int) -> None:
        self._clock = clock
        self._last = last
        self._lock = threading.Lock()

    def next(self) -> int:
        with self._lock:
            self._last = max(self._clock.now_ns(), self._last + 1)
            return self._last
