"""One guest NIC's sockets, and who answers on them. Its methods are called by the server's thread alone."""

from __future__ import annotations

import contextlib
import math
import socket

from tapmanager.dhcp import lease_plan
from tapmanager.dhcp.lease_plan import Lease
from tapmanager.ipv6 import lease as ipv6_lease
from tapmanager.ipv6.announcer import Announcer


class GuestNic:
    """`tap` is of `sockets.on_tap`, `link` of `sockets.on_link` if gateways are to be looked for. Each address family may be
    without."""

    def __init__(
        self,
        tap: socket.socket,
        lease: Lease | None,
        ipv6: ipv6_lease.Lease | None = None,
        announcer: Announcer | None = None,
        link: socket.socket | None = None,
    ) -> None:
        self.sockets = [tap] if link is None else [tap, link]
        self.tap = tap
        self._lease, self._ipv6, self._announcer = lease, ipv6, announcer

    def take(self, sock: socket.socket, data: bytes, now: float) -> None:
        """A frame that came by `sock`. Raises OSError if the answer cannot be sent."""
        if sock is not self.tap:
            if self._announcer is not None:
                self._announcer.from_network(data)
            return
        reply = None if self._lease is None else lease_plan.answer(data, self._lease)
        if reply is None and self._ipv6 is not None:
            reply = ipv6_lease.answer(data, self._ipv6)
        if reply is not None:
            self.tap.send(reply)
        elif self._announcer is not None:
            self._announcer.from_guest(data, now)

    def tick(self, now: float) -> float:
        """Does what is due; when it wants to be called again, which may be never."""
        return math.inf if self._announcer is None else self._announcer.tick(now)


def send_or_lose(sock: socket.socket, data: bytes) -> None:
    """A guest that is not there yet, or whose queue is full, does not hear it; it is said again."""
    with contextlib.suppress(OSError):
        sock.send(data)
