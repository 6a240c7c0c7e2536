"""Threads that are remembered: only what runs is."""

from __future__ import annotations

import threading


def started(thread: threading.Thread) -> threading.Thread:
    """It, running. Where the system has no thread to give, RuntimeError: so `self._thread = started(...)` remembers none."""
    thread.start()
    return thread
