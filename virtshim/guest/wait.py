"""Waiting for a guest: deadlines that the caller can cancel, time limits, and a lock that keeps order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from virtshim.model.errors import Aborted, DeadlineExceeded


@dataclass(frozen=True, slots=True)
class CancellableDeadline:
    """`until`: a point of the monotonic clock. `cancelled`: set by a caller that gives up. `patient`: the wait is for a
    session, so probes, hooks and virtshim's own requests to the guest go first. A waiting thread checks the deadline
    every `tick` seconds, so it notices a caller that gives up."""

    until: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    patient: bool = False
    tick: float = 0.1

    @classmethod
    def after(
        cls, seconds: float, cancelled: threading.Event | None = None, *, patient: bool = False
    ) -> CancellableDeadline:
        return cls(time.monotonic() + seconds, cancelled or threading.Event(), patient)

    def at_most(self, seconds: float) -> CancellableDeadline:
        return replace(self, until=min(self.until, time.monotonic() + seconds))

    def slice(self, waiting_for: str) -> float:
        """How many seconds to wait until the next check. Raises DeadlineExceeded, which names `waiting_for`, or
        Aborted."""
        if self.cancelled.is_set():
            raise Aborted("the caller gave up")
        left = self.until - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"timed out waiting for {waiting_for}")
        return min(left, self.tick)


@dataclass(frozen=True, slots=True)
class ExecLimits:
    """Seconds that virtshim waits for commands if the caller sets no limit."""

    lease: float = 5.0
    """For a free port. A port becomes free a moment after its command has ended."""
    silence: float = 5.0
    """Without output of a started command. After this time virtshim asks the agent whether the command still runs."""


USUAL: Final = ExecLimits()


class Turns:
    """A lock that serves waiting threads in the order of their arrival, but patient ones after all others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = False
        self._first: deque[object] = deque()
        self._patient: deque[object] = deque()

    @contextmanager
    def mine(self, deadline: CancellableDeadline, waiting_for: str) -> Iterator[None]:
        """Holds the lock within the block. Raises DeadlineExceeded, Aborted."""
        me = object()
        queue = self._patient if deadline.patient else self._first
        with self._changed:
            queue.append(me)
            try:
                while self._held or me is not (self._first or self._patient)[0]:
                    self._changed.wait(deadline.slice(waiting_for))
                self._held = True
            finally:
                queue.remove(me)
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()
