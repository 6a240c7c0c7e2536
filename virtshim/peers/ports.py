"""Ports to the other nodes that VMs move between."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from virtshim.model.errors import ShimError
from virtshim.system.locks import LeaveOff


class PeerLink(Protocol):
    """One authenticated connection between two nodes, for one operation. One thread at a time uses it. After any error only
    `refuse` and `close` are useful. Errors: Unavailable (the peer closed the connection, or is too slow), InvalidRequest (the
    peer's frame is malformed, too long or not expected), and the error that the peer sent: of the same class, with "node NAME: "
    before its text."""

    peer: str
    """The node's name by its certificate."""

    def send(self, message: Mapping[str, object], timeout: float) -> None:
        """At most 1 MiB as JSON."""

    def receive(self, timeout: float) -> dict[str, Any]:
        """`timeout`: until the whole message is there. A message that names a key twice is malformed."""

    def refuse(self, error: ShimError) -> None:
        """Sends kind and text of the error, which the peer's next `receive`, `send_file` or `receive_file` raises. Never raises:
        the peer may be gone."""

    def send_file(self, source: int, idle: float) -> int:
        """Sends what the descriptor has until its end, and an end mark. Returns the number of bytes. `idle`: the most seconds for
        the source to have more, and for the peer to take a chunk of 1 MiB. Raises DeadlineExceeded, InternalError for the
        source."""

    def receive_file(self, sink: int, most: int, idle: float) -> int:
        """Writes what the peer's `send_file` sends. Returns the number of bytes, and raises unless the end mark came and says
        the same number. Nothing beyond `most` bytes is written. `idle`: the most seconds for a chunk to come, and for the sink
        to take something; no other process may share the sink's open file. Raises DeadlineExceeded, ResourceExhausted (the disk
        is full), InternalError for the sink."""

    def close(self) -> None:
        """May be called twice."""


class Peers(Protocol):
    def connect(self, node: str, timeout: float, leave_off: LeaveOff | None = None) -> AbstractContextManager[PeerLink]:
        """The peer has accepted the connection inside the block. `leave_off` closes it at any time, and calls that wait for the
        peer then raise Unavailable. Raises InvalidRequest (no name of a node), Unavailable, PermissionRefused (the
        certificate there is not valid or names another node, or the node refuses ours), ResourceExhausted (the node has no place
        for another connection), WrongState like `check`."""

    def check(self) -> None:
        """Raises WrongState, with the remedy, if this node has no certificate that its peers would accept."""
