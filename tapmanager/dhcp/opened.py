"""The open sockets of one pod's guest NICs and the answers on them, and background work for the DHCP server's thread."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv6Address

from tapmanager.dhcp import lease_plan
from tapmanager.dhcp.lease_plan import Lease
from tapmanager.errors import TapmanagerError
from tapmanager.ipv6 import lease as ipv6_lease
from tapmanager.ipv6 import routers
from tapmanager.ipv6.announcer import Announcer, Ends
from tapmanager.ledger import Entry
from tapmanager.links import netns, pod_links
from tapmanager.pod import Nic

# Background work: calls for one guest that may be slow in the kernel. They must not block the thread that answers all guests.

log = logging.getLogger(__name__)

# Each call is a few netlink messages. If one hangs, the other threads serve other guests.
_AT_ONCE = 4


class Beside:
    """Only the answering thread calls `begin` and `finish`. Any thread calls `wake` when there is something to finish."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._threads = ThreadPoolExecutor(_AT_ONCE, "beside-dhcp")
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def begin(self, work: Callable[[], bool], then: Callable[[bool], None]) -> None:
        """Runs `work` in the background. A later `finish` calls `then` with its result, or False if it failed or could not
        begin."""
        once = threading.Lock()
        try:
            self._threads.submit(self._run, once, work, then)
        except RuntimeError as exc:  # no thread can be started; other guests are served without it
            # The call may still be in the queue, for the next thread.
            if once.acquire(blocking=False):
                log.warning("dhcp.work_not_begun error=%s", exc)
                self._end(then, succeeded=False)

    def finish(self) -> None:
        for _ in range(self._done.qsize()):  # no other thread reads the queue; later results wake again
            self._done.get_nowait()()

    def close(self) -> None:
        """Waits for running calls, and drops calls that have not begun."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, once: threading.Lock, work: Callable[[], bool], then: Callable[[bool], None]) -> None:
        """`once`: the first to take it either runs the work or reports it as not begun."""
        if not once.acquire(blocking=False):
            return
        succeeded = False
        try:
            succeeded = work()
        except Exception:  # after any error, the guest must get its answer
            log.exception("dhcp.work_failed")
        self._end(then, succeeded=succeeded)

    def _end(self, then: Callable[[bool], None], *, succeeded: bool) -> None:
        self._done.put(functools.partial(then, succeeded))
        self._wake()


# Raw packet sockets, made in a pod's namespace and bound to one of its links. Answers leave only through that link, and frames
# arrive at the socket before they reach the bridge.

RECEIVE_BUFFER = 64 * 1024

_ETH_P_ALL = 3
_SO_ATTACH_FILTER = 26
_SOL_PACKET = 263
_PACKET_QDISC_BYPASS, _PACKET_IGNORE_OUTGOING = 20, 23

# Classic BPF (linux/filter.h): code, jump if true, jump if false, operand.
Program = Sequence[tuple[int, int, int, int]]

_FROM_GUEST: Program = (
    (0x28, 0, 0, 12),  # ldh [12]
    (0x15, 0, 7, 0x0800),  # IPv4, or on to IPv6
    (0x30, 0, 0, 23),  # ldb [23]
    (0x15, 0, 14, 17),  # UDP
    (0x28, 0, 0, 20),  # ldh [20]
    (0x45, 12, 0, 0x3FFF),  # a fragment
    (0xB1, 0, 0, 14),  # ldxb 4*([14]&0xf)
    (0x48, 0, 0, 16),  # ldh [x+16]
    (0x15, 8, 9, 67),  # to the DHCP server's port
    (0x15, 0, 8, 0x86DD),  # IPv6
    (0x30, 0, 0, 20),  # ldb [20]
    (0x15, 0, 2, 17),  # UDP
    (0x28, 0, 0, 56),  # ldh [56]
    (0x15, 3, 4, 547),  # to the DHCPv6 server's port
    (0x15, 0, 3, 58),  # ICMPv6
    (0x30, 0, 0, 54),  # ldb [54]
    (0x15, 0, 1, 133),  # a router solicitation
    (0x06, 0, 0, 0xFFFF),  # take it
    (0x06, 0, 0, 0),  # drop it
)
_FROM_NETWORK: Program = (
    (0x28, 0, 0, 12),
    (0x15, 0, 5, 0x86DD),  # IPv6
    (0x30, 0, 0, 20),
    (0x15, 0, 3, 58),  # ICMPv6
    (0x30, 0, 0, 54),
    (0x15, 0, 1, 136),  # a neighbour advertisement
    (0x06, 0, 0, 0xFFFF),
    (0x06, 0, 0, 0),
)


def socket_on_tap(tap: str) -> socket.socket:
    """A socket for the guest's DHCP, DHCPv6 and router requests. Must run in the pod's namespace. Raises OSError."""
    return _packet_socket(tap, _FROM_GUEST)


def socket_on_link(link: str) -> socket.socket:
    """A socket for neighbour advertisements from the network behind a CNI interface. Like `socket_on_tap`."""
    return _packet_socket(link, _FROM_NETWORK)


def _packet_socket(link: str, program: Program) -> socket.socket:
    # With protocol 0 the socket receives nothing before the filter is attached. Then ETH_P_ALL, because a bridge takes the frames
    # of its ports before sockets for a single protocol get them.
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 0)
    try:
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        # After QEMU opens the tap, the kernel installs the tap's queue a moment later, and drops frames until then, such as the
        # answer to a guest that asks at once. So this socket bypasses the queue.
        sock.setsockopt(_SOL_PACKET, _PACKET_QDISC_BYPASS, 1)
        with contextlib.suppress(OSError):  # before Linux 4.20 each outgoing frame is copied to this socket
            sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        sock.bind((link, _ETH_P_ALL))
    except BaseException:
        sock.close()
        raise
    return sock


# The sockets of one guest NIC and what answers on them. Only the server's thread calls the methods.


class GuestNic:
    """`tap`: from `socket_on_tap`. `link`: from `socket_on_link`, if gateways must be found. Each address family is
    optional."""

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
        """Handles a frame that arrived on `sock`. Raises OSError if the answer cannot be sent."""
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
        """Does the work that is due. Returns the time of the next call, which may be never."""
        return math.inf if self._announcer is None else self._announcer.tick(now)


def send_or_lose(sock: socket.socket, data: bytes) -> None:
    """Sends the frame. It is lost if the guest is not there yet or its queue is full; it will be repeated."""
    with contextlib.suppress(OSError):
        sock.send(data)


def open_nics(entry: Entry, beside: Beside) -> Sequence[GuestNic]:
    """Opens the pod's NICs that have an address. `beside`: the threads of the server that will serve them. Must run in the pod's
    namespace. Raises OSError; then none is open."""
    with contextlib.ExitStack() as undo:
        opened = [found for nic in entry.nics if (found := _open_nic(entry, nic, beside, undo))]
        undo.pop_all()
    return opened


def _open_nic(entry: Entry, nic: Nic, beside: Beside, undo: contextlib.ExitStack) -> GuestNic | None:
    lease = lease_plan.lease_for(nic, entry.dns, entry.pod.hostname or entry.pod.name)
    ipv6, announced = ipv6_lease.lease_for(nic, entry.dns), routers.announcement_for(nic, entry.dns)
    if lease is None and ipv6 is None:
        return None
    tap = undo.enter_context(socket_on_tap(nic.tap))
    looks = announced is not None and announced.looks_for_gateways
    link = undo.enter_context(socket_on_link(nic.link)) if looks else None
    if announced is None:
        return GuestNic(tap, lease)
    for what in announced.left_out:
        log.warning("ipv6.route_not_told sandbox=%s interface=%s route=%s", entry.pod.sandbox, nic.link, what)
    known = {IPv6Address(address) for address in pod_links.answered_for(nic) if ":" in address}
    ends = _ends(entry.pod.sandbox, entry.netns, nic, tap, link, beside)
    announcer = Announcer(announced, ends, known, time.monotonic())
    return GuestNic(tap, lease, ipv6, announcer, link)


def _ends(
    sandbox: str, netns_path: str, nic: Nic, tap: socket.socket, link: socket.socket | None, beside: Beside
) -> Ends:
    """Makes the two ends of a NIC. Takes single values instead of the ledger entry, because the result is kept as long
    as the pod."""

    def to_network(data: bytes) -> None:
        if link is not None:
            send_or_lose(link, data)

    def make(address: IPv6Address, mac: bytes) -> bool:
        if tap.fileno() < 0:
            return False  # the pod has been released
        try:
            netns.run_inside(netns_path, functools.partial(pod_links.stand_in_for, nic, address, mac))
        except (TapmanagerError, OSError) as exc:
            log.warning("ipv6.router_not_answered sandbox=%s interface=%s error=%s", sandbox, nic.link, exc)
            return False
        return True

    def stand_in(address: IPv6Address, mac: bytes, then: Callable[[bool], None]) -> None:
        beside.begin(functools.partial(make, address, mac), then)

    return Ends(functools.partial(send_or_lose, tap), to_network, stand_in)
