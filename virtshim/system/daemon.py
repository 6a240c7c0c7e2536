"""What our daemons have in common: systemd is told their state, signals stop or reload them, glibc keeps their memory."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Final

# Tells systemd the daemon's state: sd_notify(3) and the watchdog, by hand. Does nothing where nobody listens.
#
# READY=1      recovery is over, calls are served
# STATUS=...   one line for `systemctl status`
# WATCHDOG=1   still alive
# STOPPING=1   on the way out

# systemd reads at once; a full queue must never hold a life-cycle step up.
_TIMEOUT = 0.5


def notify_systemd(*lines: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Sends `lines`, each `KEY=value`, as one message to NOTIFY_SOCKET. True if somebody took it: the daemon's work never
    depends on that, so nothing is raised for a listener that is gone. Line breaks inside a line become spaces."""
    address = environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return False
    message = "\n".join(" ".join(line.splitlines()) for line in lines).encode(errors="replace")
    name = b"\0" + os.fsencode(address[1:]) if address[0] == "@" else os.fsencode(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(_TIMEOUT)
        try:
            sock.sendto(message, name)
        except OSError:
            return False
    return True


def watchdog_interval(environ: Mapping[str, str] = os.environ) -> float | None:
    """Seconds within which WATCHDOG=1 must come, or systemd kills the daemon; None if no watchdog runs for this process.
    Tell it twice as often."""
    try:
        microseconds = int(environ.get("WATCHDOG_USEC", ""))
        pid = int(environ.get("WATCHDOG_PID", str(os.getpid())))
    except ValueError:
        return None
    if microseconds <= 0 or pid != os.getpid():
        return None
    return microseconds / 1_000_000


# How a program of ours is told to stop: SIGTERM by systemd, SIGINT by whoever started it in a terminal; and to read
# its settings again: SIGHUP.


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


# How glibc keeps this process's memory; nothing happens with another C library. Before threads are started.

# malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

_LARGE: Final = 32 << 20


def share_one_heap() -> None:
    """glibc gives threads heaps of their own, against contention. Ours seldom run at once (one holds Python's lock), and each
    heap keeps what it once held: 7 MiB with a handful of pods."""
    _mallopt(_M_ARENA_MAX, 1)


def keep_large_blocks() -> None:
    """What is given back to the system for each message has to be faulted in and cleared for the next: a list of 500 pods, of
    640 KiB, cost half as much again. Up to 32 MiB are kept instead."""
    _mallopt(_M_MMAP_THRESHOLD, _LARGE)
    _mallopt(_M_TRIM_THRESHOLD, _LARGE)


def _mallopt(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
