"""A deadline that the caller can cancel."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from virtshim.domain.errors import Aborted, DeadlineExceeded

# A caller that gives up is noticed within this many seconds.
_SLICE = 0.1


@dataclass(frozen=True, slots=True)
class CancellableDeadline:
    """`until` is a point of the monotonic clock, `cancelled` is set by a caller that has gone."""

    until: float
    cancelled: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, seconds: float, cancelled: threading.Event | None = None) -> CancellableDeadline:
        return cls(time.monotonic() + seconds, cancelled or threading.Event())

    def at_most(self, seconds: float) -> CancellableDeadline:
        return CancellableDeadline(min(self.until, time.monotonic() + seconds), self.cancelled)

    def slice(self, waiting_for: str) -> float:
        """Seconds to wait at a time. Raises DeadlineExceeded, naming what did not come, or Aborted."""
        if self.cancelled.is_set():
            raise Aborted("the caller gave up")
        left = self.until - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"timed out waiting for {waiting_for}")
        return min(left, _SLICE)
