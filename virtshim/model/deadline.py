"""How long a call may still take: a point in time that is passed down; each step asks how much time is left."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.model.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at` is in seconds of the monotonic clock that made it."""

    at: float

    @classmethod
    def after(cls, now: float, seconds: float) -> Deadline:
        return cls(now + seconds)

    def left(self, now: float) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - now)

    def check(self, now: float, doing: str) -> None:
        """Raises DeadlineExceeded naming what was about to be done."""
        if now >= self.at:
            raise DeadlineExceeded(f"the caller's deadline passed before {doing}")
