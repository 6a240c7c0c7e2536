"""Checks which process or user is at the other end of a Unix socket or of a local TCP connection."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
import struct
import sys
from typing import Final

# Connects only to the intended process, even if another user may have made the Unix socket. The listener sees our credentials,
# and libvirt, D-Bus and our own daemons trust root's. So a symbolic link must not lead us to one of their sockets: the path is
# opened with O_PATH and O_NOFOLLOW, the opened socket is checked, and then exactly this socket is connected to.

# A peer's pid, uid and gid (unix(7)), and a timeval.
_CREDENTIALS: Final = struct.Struct("iII")
_TIME: Final = struct.Struct("@ll")
_UID: Final = re.compile(r"^Uid:\s+\d+\s+(\d+)", re.MULTILINE)


class WrongPeer(Exception):
    """The message says what is there instead."""


def connect_to(path: str, pid: int, limit: int) -> socket.socket:
    """Connects to the socket at `path`. The process `pid` must listen there, and the socket must belong to the process's user.
    Sends nothing before both are checked. Raises WrongPeer, or OSError, also if there is no answer within `limit` seconds."""
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        user = _user_of(pid)
        _refuse_unless_socket_of(user, os.fstat(place))
        with contextlib.ExitStack() as on_failure:
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            on_failure.callback(connected.close)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(int(limit), 0))
            _connect(connected, place)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(0, 0))
            _refuse_unless_peer_is(pid, user, connected)
            on_failure.pop_all()
            return connected
    finally:
        os.close(place)


def _refuse_unless_socket_of(user: int, found: os.stat_result) -> None:
    if not stat.S_ISSOCK(found.st_mode):
        raise WrongPeer("it is not a socket")
    if found.st_uid != user:
        raise WrongPeer(f"the socket belongs to user {found.st_uid}, not to {user}")


def _refuse_unless_peer_is(pid: int, user: int, connected: socket.socket) -> None:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    peer, uid, _ = _CREDENTIALS.unpack(credentials)
    if (peer, uid) != (pid, user):
        raise WrongPeer(f"process {peer} of user {uid} listens there, not process {pid} of user {user}")


def _connect(connected: socket.socket, place: int) -> None:
    try:
        connected.connect(f"/proc/self/fd/{place}")
    except BlockingIOError as exc:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from exc


def _user_of(pid: int) -> int:
    """The process's effective user. The owner of its directory in /proc may differ: it is root for an undumpable process."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        found = _UID.search(file.read())
    if found is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return int(found[1])


_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED: Final = "01"
_MAPPED: Final = bytes(10) + b"\xff\xff"


def tcp_peer_uid(connected: socket.socket) -> int | None:
    """The user id of the process at the other end, from /proc/net. None if the other end is on another machine. None also if the
    other end is closed, because the kernel lists closed ends as root's. Raises OSError."""
    theirs, ours = _ends(connected)
    for table in _TABLES:
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file if any(end in line for end in theirs)]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for row in rows:
            _, local, remote, state, *others = row
            if local in theirs and remote in ours and state == _ESTABLISHED and others[5] != "0":
                return int(others[3])
    return None


def _ends(connected: socket.socket) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return _table_entries(*connected.getpeername()[:2]), _table_entries(*connected.getsockname()[:2])


def _table_entries(host: str, port: int) -> tuple[str, ...]:
    """The address as the tables spell it. An IPv4 address may be in the table for IPv6 too."""
    if ":" in host:
        return (_words(socket.inet_pton(socket.AF_INET6, host), port),)
    address = socket.inet_pton(socket.AF_INET, host)
    return _words(address, port), _words(_MAPPED + address, port)


def _words(address: bytes, port: int) -> str:
    words = (address[at : at + 4] for at in range(0, len(address), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"
