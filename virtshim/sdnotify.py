"""Tells systemd the daemon's state: sd_notify(3) and the watchdog, by hand. Does nothing where nobody listens.

READY=1      recovery is over, calls are served
STATUS=...   one line for `systemctl status`
WATCHDOG=1   still alive
STOPPING=1   on the way out
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

# systemd reads at once; a full queue must never hold a life-cycle step up.
_TIMEOUT = 0.5


def notify(*lines: str, environ: Mapping[str, str] = os.environ) -> bool:
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
