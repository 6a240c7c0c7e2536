"""The process at the other end of a connection, from the kernel (SO_PEERCRED)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from tapmanager.errors import wrong_state


@dataclass(frozen=True, slots=True)
class Peer:
    """`pid`: in this process's own pid namespace."""

    uid: int
    pid: int

    @property
    def is_root(self) -> bool:
        return self.uid == 0


def peer_of(conn: socket.socket) -> Peer:
    pid, uid, _ = struct.unpack("iII", conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
    return Peer(uid, pid)


def process_of(peer: Peer) -> str:
    """The process's pid and start time, which together are unique; exec changes neither. Raises TapmanagerError
    (failed-precondition) if the process has ended."""
    try:
        with open(f"/proc/{peer.pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise wrong_state(f"process {peer.pid} has ended") from exc
    return f"{peer.pid}/{fields[19]}"
