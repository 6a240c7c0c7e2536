"""Waiting in a VM: a deadline that the caller can cancel, limits, and turns."""

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
    """`until` is a point of the monotonic clock, `cancelled` is set by a caller that has gone. `patient`: on behalf of a
    session, which lets probes, hooks and whatever else virtshim wants of the guest go first. Who waits looks at it every
    `tick` seconds, and so notices a caller that gives up."""

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
        """Seconds to wait at a time. Raises DeadlineExceeded, naming what did not come, or Aborted."""
        if self.cancelled.is_set():
            raise Aborted("the caller gave up")
        left = self.until - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"timed out waiting for {waiting_for}")
        return min(left, self.tick)


@dataclass(frozen=True, slots=True)
class ExecLimits:
    """How long commands are waited for where no caller says it; seconds."""

    lease: float = 5.0
    """For a free port: it is free again a moment after its command has ended."""
    silence: float = 5.0
    """Of a command that has begun, after which the agent is asked whether it still runs."""


USUAL: Final = ExecLimits()


class Turns:
    """A lock whose waiters come in their order, the patient ones after all others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = False
        self._first: deque[object] = deque()
        self._patient: deque[object] = deque()

    @contextmanager
    def mine(self, deadline: CancellableDeadline, waiting_for: str) -> Iterator[None]:
        """Raises DeadlineExceeded, Aborted."""
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
