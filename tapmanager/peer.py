"""Who is at the other end of a connection, as the kernel tells it (SO_PEERCRED)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """`pid` as in our own process namespace."""

    uid: int
    pid: int

    @property
    def is_root(self) -> bool:
        return self.uid == 0


def peer_of(conn: socket.socket) -> Peer:
    pid, uid, _ = struct.unpack("3i", conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return Peer(uid, pid)
