"""Two guests, one of them hostile, on tapmanager's server for leases and router advertisements; socket pairs replace the
taps."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tapmanager.dhcp.opened import GuestNic
from tapmanager.dhcp.server import DhcpServer


class Tap:
    """The server's end of the tap, a packet socket to it, and the guest's end."""

    def __init__(self, ethertype: int) -> None:
        self._ethertype = ethertype
        self._end, self.guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._end.setblocking(False)
        self.guest.settimeout(60)

    def fileno(self) -> int:
        return self._end.fileno()

    def recvfrom(self, size: int) -> tuple[bytes, tuple[str, int, int]]:
        return self._end.recv(size), ("tap", self._ethertype, 1)

    def recv(self, size: int) -> bytes:
        return self._end.recv(size)

    def send(self, data: bytes) -> int:
        return self._end.send(data)

    def close(self) -> None:
        self._end.close()


@dataclass
class TwoGuests:
    dhcp: DhcpServer
    hostile: Tap
    other: Tap

    def answers_before(self, request: bytes, is_answer: Callable[[bytes], bool]) -> list[bytes]:
        """All frames that the hostile guest received before the answer to a final valid request."""
        seen: list[bytes] = []
        self.hostile.guest.send(request)
        while True:
            seen.append(self.hostile.guest.recv(65536))
            if is_answer(seen[-1]):
                return seen[:-1]

    def flood(self, frame: bytes) -> None:
        """Sends as many of the frames as possible."""
        self.hostile.guest.setblocking(False)
        for _ in range(1000):
            with contextlib.suppress(BlockingIOError):
                self.hostile.guest.send(frame)

    def is_read(self) -> bool:
        """Whether the server currently reads frames of both guests."""
        return not self.dhcp.flooded()


@contextlib.contextmanager
def two_guests(ethertype: int, nic: Callable[[Tap], GuestNic]) -> Iterator[tuple[DhcpServer, Tap, Tap]]:
    """`nic`: the configuration that is served on a tap."""
    dhcp = DhcpServer()
    taps = Tap(ethertype), Tap(ethertype)
    dhcp.start()
    for name, tap in zip(("hostile", "other"), taps, strict=True):
        dhcp.serve(name, nic(tap))
    yield dhcp, *taps
    assert dhcp.is_alive()
    dhcp.stop()
    for tap in taps:
        tap.guest.close()
