"""One thread answers all guests, and slow work for one guest delays no other."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv6Address

import pytest

from tapmanager.dhcp.opened import GuestNic
from tapmanager.dhcp.server import DhcpServer
from tapmanager.ipv6 import frame
from tapmanager.ipv6.announcer import Announcer, Ends
from tapmanager.ipv6.frame import Packet
from tapmanager.ipv6.routers import Announcement, Router

MAC, SERVER_MAC, GATEWAY_MAC = (bytes.fromhex(one) for one in ("0a58c0a80002", "020000000002", "020000000011"))
STAND_IN, GATEWAY = IPv6Address("fe80::7669:7274:0:1"), IPv6Address("fd00::1")
BEHIND = Router(STAND_IN, GATEWAY, GATEWAY_MAC, is_default=True, routes=())
ITSELF = Router(IPv6Address("fe80::1"), None, None, is_default=True, routes=())


class Tap:
    """The server's end of a packet socket, and the guest's."""

    def __init__(self) -> None:
        self._end, self.guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._end.setblocking(False)
        self.guest.settimeout(60)

    def fileno(self) -> int:
        return self._end.fileno()

    def recvfrom(self, size: int) -> tuple[bytes, tuple[str, int, int]]:
        return self._end.recv(size), ("tap", 0x86DD, 1)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._end.send(data)

    def close(self) -> None:
        self._end.close()

    def asks(self) -> None:
        group = IPv6Address("ff02::2")
        source = IPv6Address("fe80::858:c0ff:fea8:2")
        body = b"\x85" + bytes(7)
        self.guest.send(frame.build(Packet(MAC, frame.group_mac(group), source, group, frame.ICMP, body)))

    def hears(self) -> IPv6Address:
        """Who advertises itself next."""
        return frame.parse(self.guest.recv(2048)).source


class Node:
    """A server, and guests of which a router is made by `work`."""

    def __init__(self) -> None:
        self.dhcp = DhcpServer()
        self.dhcp.start()
        self._taps: list[Tap] = []

    def guest(self, name: str, router: Router, work: Callable[[], bool] = lambda: True) -> Tap:
        tap = Tap()
        self._taps.append(tap)
        ends = Ends(tap.send, lambda data: None, lambda address, mac, then: self.dhcp.beside.begin(work, then))
        announced = Announcement(MAC, SERVER_MAC, IPv6Address("fd00::5"), 1500, (router,))
        announcer = Announcer(announced, ends, (), time.monotonic())
        self.dhcp.serve(name, GuestNic(tap, None, None, announcer))  # type: ignore[arg-type]
        return tap

    def close(self) -> None:
        self.dhcp.stop()
        for tap in self._taps:
            tap.guest.close()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


def test_a_router_that_is_slow_to_set_up_delays_no_other_guest(node: Node) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow() -> bool:
        begun.set()
        return may_end.wait(60)

    try:
        waiting = node.guest("waiting", BEHIND, slow)
        assert begun.wait(60)
        other = node.guest("other", ITSELF)
        assert other.hears() == ITSELF.address
        other.asks()
        assert other.hears() == ITSELF.address, "it is answered while the first is waiting"
    finally:
        may_end.set()
    assert waiting.hears() == STAND_IN


def test_an_unexpected_error_counts_as_failed_work(node: Node) -> None:
    failed = threading.Event()

    def broken(first: list[None]) -> bool:
        if first:
            first.pop()
            failed.set()
            raise RuntimeError("no words for it")
        return True

    guest = node.guest("broken", BEHIND, functools.partial(broken, [None]))
    assert failed.wait(60)
    assert node.dhcp.is_alive()
    assert guest.hears() == STAND_IN, "it is tried again"


def test_without_threads_guests_are_still_answered_and_pending_work_runs_once_later(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, threading.Event()
    done: list[None] = []

    def starts_none(thread: threading.Thread) -> None:
        if thread.name.startswith("beside-dhcp"):
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    def work() -> bool:
        done.append(None)
        return True

    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", starts_none)
        waiting = node.guest("waiting", BEHIND, work)
        assert refused.wait(60)
        other = node.guest("other", ITSELF)
        assert other.hears() == ITSELF.address, "it is answered all the same"
        assert node.dhcp.is_alive()
    assert waiting.hears() == STAND_IN, "it is tried again"
    assert done == [None]


def test_a_guest_released_during_the_set_up_of_its_router_gets_no_advertisement(node: Node) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> bool:
        begun.set()
        try:
            return may_end.wait(60)
        finally:
            ended.set()

    node.guest("gone", BEHIND, slow)
    assert begun.wait(60)
    node.dhcp.forget("gone")
    may_end.set()
    assert ended.wait(60)
    assert node.guest("next", ITSELF).hears() == ITSELF.address
