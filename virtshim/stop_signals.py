"""How a program of ours is told to stop: SIGTERM by systemd, SIGINT by whoever started it in a terminal; and to read its settings
again: SIGHUP."""

from __future__ import annotations

import queue
import signal
import threading
from types import FrameType


def stop_event() -> threading.Event:
    """Set by either signal from now on. Called in the main thread."""
    stopping = threading.Event()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return stopping


def reload_requests() -> queue.SimpleQueue[None]:
    """One entry for each SIGHUP from now on. Called in the main thread."""
    # A queue's put() may be called where a signal has interrupted it; an Event's set() may not.
    asked: queue.SimpleQueue[None] = queue.SimpleQueue()

    def reload(_signal: int, _frame: FrameType | None) -> None:
        asked.put(None)

    signal.signal(signal.SIGHUP, reload)
    return asked
