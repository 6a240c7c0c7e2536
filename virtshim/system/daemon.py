"""Parts of all our daemons: messages to systemd, signals that stop or reload, libraries' extras that no daemon loads."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Final

# sd_notify(3) and the watchdog:
#
# READY=1      recovery is over, calls are served
# STATUS=...   one line for `systemctl status`
# WATCHDOG=1   still alive
# STOPPING=1   the daemon is stopping

# systemd reads at once; a full queue must never delay a life-cycle step.
_TIMEOUT = 0.5


def notify_systemd(*lines: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Sends `lines`, each `KEY=value`, as one message to NOTIFY_SOCKET, and returns whether it was delivered. Raises
    nothing, because the daemon works without systemd too. Line breaks inside a line become spaces."""
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
    """Seconds after which systemd kills the daemon unless it gets WATCHDOG=1; None without a watchdog. Send it twice as often."""
    try:
        microseconds = int(environ.get("WATCHDOG_USEC", ""))
        pid = int(environ.get("WATCHDOG_PID", str(os.getpid())))
    except ValueError:
        return None
    if microseconds <= 0 or pid != os.getpid():
        return None
    return microseconds / 1_000_000


# SIGTERM (by systemd) and SIGINT (in a terminal) stop our programs; SIGHUP makes them read their settings again.


def stop_event() -> threading.Event:
    """An event that SIGTERM and SIGINT set from now on. Called in the main thread."""
    stopping = threading.Event()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return stopping


def reload_requests() -> queue.SimpleQueue[None]:
    """One entry for each SIGHUP from now on. Called in the main thread."""
    # A SimpleQueue's put() is safe in a signal handler; an Event's set() is not.
    asked: queue.SimpleQueue[None] = queue.SimpleQueue()

    def reload(_signal: int, _frame: FrameType | None) -> None:
        asked.put(None)

    signal.signal(signal.SIGHUP, reload)
    return asked


# What structlog and urllib3 import if it is installed.

_EXTRAS: Final = ("backports.zstd", "colorama", "compression.zstd", "greenlet", "rich")


def do_without_extras() -> None:
    """Must be called before structlog and urllib3 are imported. The extras are for tracebacks in colour, which a daemon's log
    never has, for green threads, and for compressed HTTP answers, which a pull does not accept. This saves 6 MiB."""
    for name in _EXTRAS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # means: cannot be imported
