"""A clock that advances only when a test or a waiter moves it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fakes.journal import WAIT_LIMIT

START_NS = 1_800_000_000_000_000_000


class FakeClock:
    """Implements `virtshim.system.clock.Clock`. Waiting takes no real time: the clock jumps to the end of the wait, or
    to the first action planned with `at`. With `held`, it stands still until `advance` is called, for tests with
    several threads."""

    def __init__(self) -> None:
        self.held = False
        self._seconds = 1000.0
        self._skew_ns = 0
        self._planned: list[tuple[float, Callable[[], object]]] = []
        self._waiting: list[tuple[float, threading.Event]] = []
        self._changed = threading.Condition()

    def now_ns(self) -> int:
        return START_NS + int(self._seconds * 1_000_000_000) + self._skew_ns

    def monotonic(self) -> float:
        return self._seconds

    def set_back(self, seconds: float) -> None:
        """Sets the wall clock back."""
        self._skew_ns -= int(seconds * 1_000_000_000)

    def at(self, seconds: float, do: Callable[[], object]) -> None:
        """Plans an action in so many seconds."""
        self._planned.append((self._seconds + seconds, do))

    def advance(self, seconds: float) -> None:
        until = self._seconds + seconds
        while self._run_next_before(until):
            pass
        with self._changed:
            self._seconds = until
            due = [one for one in self._waiting if one[0] <= until]
            self._waiting = [one for one in self._waiting if one[0] > until]
        for _, event in due:
            with event._cond:  # type: ignore[attr-defined]  # wakes who waits; to set the event would say that something happened
                event._cond.notify_all()  # type: ignore[attr-defined]

    def wait(self, event: threading.Event, seconds: float) -> bool:
        if self.held and seconds > 0:
            return self._wait_held(event, seconds)
        until = self._seconds + seconds
        while not event.is_set() and self._run_next_before(until):
            pass
        if not event.is_set():
            self._seconds = max(self._seconds, until)
        return event.is_set()

    def until_waiting(self, count: int = 1) -> None:
        """Waits until so many threads wait on the held clock."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._waiting) >= count, WAIT_LIMIT), "nobody waits"

    def _wait_held(self, event: threading.Event, seconds: float) -> bool:
        with self._changed:
            mine = (self._seconds + seconds, event)
            self._waiting.append(mine)
            self._changed.notify_all()
        with event._cond:  # type: ignore[attr-defined]
            while not event.is_set() and any(one is mine for one in self._waiting):
                assert event._cond.wait(WAIT_LIMIT), "the held clock was never moved"  # type: ignore[attr-defined]
        with self._changed:
            self._waiting = [one for one in self._waiting if one is not mine]
        return event.is_set()

    def _run_next_before(self, until: float) -> bool:
        due = min(self._planned, key=lambda plan: plan[0], default=None)
        if due is None or due[0] > until:
            return False
        self._planned.remove(due)
        self._seconds = max(self._seconds, due[0])
        due[1]()
        return True
