"""Time."""

from __future__ import annotations

import threading
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Wall clock, nanoseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds of a clock that never jumps."""

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """True if the event was set within that time."""
