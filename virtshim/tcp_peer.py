"""Which user of this machine has the other end of a TCP connection: the kernel says so in /proc/net, while it is open."""

from __future__ import annotations

import socket
import sys
from typing import Final

_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED: Final = "01"
_MAPPED: Final = bytes(10) + b"\xff\xff"


def user_of(connected: socket.socket) -> int | None:
    """None if nobody of this machine has it, or not any more: an end that was closed is listed as root's. Raises OSError."""
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
    return _spelt(*connected.getpeername()[:2]), _spelt(*connected.getsockname()[:2])


def _spelt(host: str, port: int) -> tuple[str, ...]:
    """As in the tables. An IPv4 address may be in that of IPv6, too."""
    if ":" in host:
        return (_words(socket.inet_pton(socket.AF_INET6, host), port),)
    address = socket.inet_pton(socket.AF_INET, host)
    return _words(address, port), _words(_MAPPED + address, port)


def _words(address: bytes, port: int) -> str:
    words = (address[at : at + 4] for at in range(0, len(address), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"
