"""Tells systemd our state: READY, WATCHDOG, STOPPING; takes over an activated socket. No libsystemd, no dependency.

Protocols: sd_notify(3), sd_watchdog_enabled(3), sd_listen_fds(3).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

_FIRST_FD = 3


def notify(environ: Mapping[str, str], *lines: str) -> None:
    """Does nothing if no one listens; never fails: it is only a message."""
    address = environ.get("NOTIFY_SOCKET")
    if not address:
        return
    where = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto("\n".join(lines).encode(), where)


def watchdog_seconds(environ: Mapping[str, str], pid: int) -> float | None:
    """How often WATCHDOG=1 is due (half of what systemd waits); None if it is not watching this process."""
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    usec = environ.get("WATCHDOG_USEC", "")
    return int(usec) / 2_000_000 if usec.isdecimal() and int(usec) > 0 else None


def activated_socket(environ: Mapping[str, str], pid: int) -> socket.socket | None:
    """The one listening socket systemd opened for us, if it did."""
    if environ.get("LISTEN_PID") != str(pid) or environ.get("LISTEN_FDS") != "1":
        return None
    os.set_inheritable(_FIRST_FD, False)
    return socket.socket(fileno=_FIRST_FD)
