"""One reading at a time, shared by all who ask for one, and given up on when it is late: then the last one is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import structlog

from virtshim.ports.clock import Clock

log = structlog.get_logger(__name__)

R = TypeVar("R")

# Seconds. Prometheus' own limit is 10; a reading is bounded itself, and this is for what it did not foresee.
LIMIT: Final = 6.0
# Whoever asks again so soon is told the same.
FRESH: Final = 1.0


@dataclass(frozen=True, slots=True)
class Taken(Generic[R]):
    """`at`: when its reading began (time.monotonic()); `seconds` it took."""

    value: R
    at: float
    seconds: float


class Sampler(Generic[R]):
    """Thread-safe. Readings that hang hold one thread in all."""

    def __init__(self, read: Callable[[], R], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._changed = threading.Condition()
        self._last: Taken[R] | None = None
        self._reading = False

    def latest(self) -> tuple[Taken[R] | None, bool]:
        """The newest reading there is, None if there never was one; and whether a newer one is late."""
        asked = self._clock.monotonic()
        with self._changed:
            if self._is_of(asked - FRESH):
                return self._last, False
            if not self._reading:
                # It takes the lock first, so it is late enough to say so then; without a thread the next one tries again.
                threading.Thread(target=self._take, name="scrape", daemon=True).start()
                self._reading = True
            # One that began before we asked is good enough: all who wait share it.
            self._changed.wait_for(lambda: not self._reading, LIMIT)
            return self._last, self._reading or not self._is_of(asked - LIMIT)

    def _is_of(self, moment: float) -> bool:
        return self._last is not None and self._last.at + self._last.seconds >= moment

    def _take(self) -> None:
        began = self._clock.monotonic()
        taken: Taken[R] | None = None
        try:
            taken = Taken(self._read(), began, self._clock.monotonic() - began)
        except Exception:  # the edge of a thread: who waits is told the last one
            log.exception("scrape.crashed")
        with self._changed:
            self._last = taken or self._last
            self._reading = False
            self._changed.notify_all()
