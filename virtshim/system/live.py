"""A setting that an operator may change while virtshim runs."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Live(Generic[T]):
    """Read `now` at each use, and only once for values that must belong together. Thread-safe."""

    __slots__ = ("now",)

    def __init__(self, now: T) -> None:
        self.now = now
