"""A deadline of a call: a point in time that is passed down, so that each step can ask how much time is left."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.model.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at`: seconds of the monotonic clock."""

    at: float

    @classmethod
    def after(cls, now: float, seconds: float) -> Deadline:
        return cls(now + seconds)

    def left(self, now: float) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - now)

    def check(self, now: float, doing: str) -> None:
        """Raises DeadlineExceeded, naming the step that was about to run, if the deadline has passed."""
        if now >= self.at:
            raise DeadlineExceeded(f"the caller's deadline passed before {doing}")
