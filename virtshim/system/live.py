"""A value that an operator may change while the node is served."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Live(Generic[T]):
    """`now` is read at each use, once for what belongs together. Any thread."""

    __slots__ = ("now",)

    def __init__(self, now: T) -> None:
        self.now = now
