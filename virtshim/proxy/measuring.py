"""Measures the proxy's calls, and how much of their time the proxy itself takes, not the runtimes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final, Protocol

# The label of unknown methods, because callers may invent names.
OTHER: Final = "other"


class ProxyMeter(Protocol):
    """Called on the loop: quick, and never raises."""

    def call_took(self, method: str, code: str, seconds: float, added: float | None) -> None:
        """`added`: the seconds without waiting for a runtime; None for streams."""

    def runtime_took(self, runtime: str, method: str, code: str, seconds: float) -> None: ...

    def spans(self, result: str, number: int) -> None:
        """As in `virtshim.metrics.observed.Meter`."""


class Uncounted:
    """Counts nothing."""

    def call_took(self, method: str, code: str, seconds: float, added: float | None) -> None: ...

    def runtime_took(self, runtime: str, method: str, code: str, seconds: float) -> None: ...

    def spans(self, result: str, number: int) -> None: ...


class Waits:
    """The time that a call and its tasks have waited for at least one runtime."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._open = 0
        self._since = 0.0

    def begin(self) -> None:
        if not self._open:
            self._since = time.monotonic()
        self._open += 1

    def end(self) -> None:
        self._open -= 1
        if not self._open:
            self.seconds += time.monotonic() - self._since


_waits: ContextVar[Waits | None] = ContextVar("waits", default=None)


def counted() -> Waits:
    """Starts counting for the current task and the tasks that it starts from now on."""
    waits = Waits()
    _waits.set(waits)
    return waits


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Counts the block as waiting for a runtime."""
    waits = _waits.get()
    if waits is None:
        yield
        return
    waits.begin()
    try:
        yield
    finally:
        waits.end()


def short(path: str) -> str:
    """The method's name in its path."""
    return path.rpartition("/")[2]
