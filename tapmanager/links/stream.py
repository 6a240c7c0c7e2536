"""Connects to passt, which carries the frames of one VM over a stream socket."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import threading
import time

from tapmanager.errors import TapmanagerError, internal, wrong_state
from tapmanager.network_values import mac_bytes

_POLL = 0.01
# No passt listens, or it has not yet taken the connection of an earlier call.
_NOT_YET = (errno.ECONNREFUSED, errno.EAGAIN)


def connect(path: str, mac: str, until: float) -> int:
    """A connection that the caller owns, close-on-exec. passt knows the guest's `mac` from then on: connections to a guest that
    has not sent a frame yet would be lost. Only root may change the socket's directory, because a link there would give the VM
    a connection to another program. Raises TapmanagerError and OSError."""
    folder, name = os.path.split(path)
    try:
        at = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise _ended(path) from exc
    try:
        _require_safe(path, os.fstat(at), name, at)
        connection = _connected(f"/proc/self/fd/{at}/{name}", path, until)
    finally:
        os.close(at)
    try:
        connection.sendall(_first_frame(mac_bytes(mac)))
    except OSError as exc:
        connection.close()
        raise _ended(path) from exc
    return connection.detach()


def _first_frame(mac: bytes) -> bytes:
    """An ARP reply without an address (RFC 826), after its length. Nobody answers a reply."""
    frame = b"\xff" * 6 + mac + struct.pack("!HHHBBH", 0x0806, 1, 0x0800, 6, 4, 2) + mac + bytes(4 + 6 + 4)
    return struct.pack("!I", len(frame)) + frame


def _require_safe(path: str, folder: os.stat_result, name: str, at: int) -> None:
    if folder.st_uid != 0 or folder.st_mode & 0o022:
        raise internal(f"{path}: others than root may change its directory")
    try:
        there = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError as exc:
        raise _ended(path) from exc
    if not stat.S_ISSOCK(there.st_mode):
        raise internal(f"{path} is not a socket")


def _connected(through: str, path: str, until: float) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(max(until - time.monotonic(), _POLL))
            connection.connect(through)
        except OSError as exc:
            connection.close()
            if exc.errno not in _NOT_YET:
                raise
            if time.monotonic() >= until:
                raise _ended(path) from exc
        else:
            connection.setblocking(True)
            return connection
        threading.Event().wait(_POLL)


def _ended(path: str) -> TapmanagerError:
    return wrong_state(f"the VM's passt has ended ({path}); restart the container")
