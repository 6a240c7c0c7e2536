"""Waiting for another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fakes.journal import WAIT_LIMIT

_tick = threading.Event()


def eventually(condition: Callable[[], object]) -> None:
    """Waits until the condition holds."""
    until = time.monotonic() + WAIT_LIMIT
    while not condition():
        assert time.monotonic() < until, "it never came to hold"
        _tick.wait(0.002)
