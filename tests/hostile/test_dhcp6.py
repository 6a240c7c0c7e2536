"""Each frame of a guest to the DHCPv6 server and the router on its tap gets small answers or none, and the other guest
is served."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterator
from ipaddress import IPv6Address, IPv6Network

import pytest
from fakes.guest_taps import Tap, TwoGuests, two_guests
from podclient import wait_until

from tapmanager.dhcp.opened import GuestNic
from tapmanager.ipv6 import frame
from tapmanager.ipv6.announcer import Announcer, Ends
from tapmanager.ipv6.frame import Packet
from tapmanager.ipv6.lease import (
    ADVERTISE,
    OPT_CLIENT_ID,
    OPT_IA_ADDRESS,
    OPT_IA_NA,
    SOLICIT,
    Lease,
    address_option,
    build_message,
    encode_options,
)
from tapmanager.ipv6.routers import Announcement, Router

pytestmark = pytest.mark.hostile

MAC = bytes.fromhex("0a58c0a80002")
OWN, LINK_LOCAL, GATEWAY = IPv6Address("fd00::5"), IPv6Address("fe80::858:c0ff:fea8:2"), IPv6Address("fe80::1")
LEASE = Lease(MAC, bytes.fromhex("020000000002"), (OWN,), (IPv6Address("fd00::10"),), ("default.svc.cluster.local",))
ROUTER = Router(GATEWAY, None, None, is_default=True, routes=())
ANNOUNCEMENT = Announcement(
    MAC, LEASE.server_mac, OWN, 1450, (ROUTER,), (IPv6Network("fd00::/64"),), LEASE.dns, LEASE.searches
)


def served(tap: Tap) -> GuestNic:
    ends = Ends(tap.send, lambda data: None, lambda address, mac, then: then(True))  # type: ignore[arg-type, return-value]
    return GuestNic(tap, None, LEASE, Announcer(ANNOUNCEMENT, ends, (), time.monotonic()))  # type: ignore[arg-type]


class Node(TwoGuests):
    def answers(self) -> list[bytes]:
        last = in_frame(b"\x01END" + SOLICITED[4:])
        return self.answers_before(last, lambda sent: frame.parse(sent).payload[9:12] == b"END")

    def serves_the_other(self) -> bool:
        self.other.guest.send(in_frame(SOLICITED))
        while (packet := frame.parse(self.other.guest.recv(65536))).protocol != frame.UDP:
            pass
        return packet.payload[8] == ADVERTISE


@pytest.fixture
def node() -> Iterator[Node]:
    with two_guests(0x86DD, served) as parts:
        found = Node(*parts)
        for tap in (found.hostile, found.other):
            assert tap.guest.recv(2048)[54] == 134  # sent to a guest without a request
        yield found


CLIENT = (OPT_CLIENT_ID, b"\0\3\0\1" + MAC)
IA = (OPT_IA_NA, b"\0\0\0\1" + bytes(8))
SOLICITED = build_message(SOLICIT, b"abc", [CLIENT, IA])


def in_frame(body: bytes) -> bytes:
    group = frame.DHCP_SERVERS
    return frame.build(Packet(MAC, frame.group_mac(group), LINK_LOCAL, group, frame.UDP, frame.udp(546, 547, body), 1))


def icmp(payload: bytes) -> bytes:
    group = IPv6Address("ff02::2")
    return frame.build(Packet(MAC, frame.group_mac(group), LINK_LOCAL, group, frame.ICMP, payload))


ROUTER_SOLICITATION = icmp(b"\x85" + bytes(7))
GOOD = in_frame(SOLICITED)
_IP, _UDP = 14, 54


def patched(at: int, *values: int, of: bytes = GOOD) -> bytes:
    """The valid request with these bytes at that offset of its frame."""
    return of[:at] + bytes(values) + of[at + len(values) :]


def nested(depth: int) -> bytes:
    """Addresses nested in each other."""
    inner = b""
    for _ in range(depth):
        inner = encode_options([(OPT_IA_ADDRESS, bytes(24) + inner)])
    return build_message(SOLICIT, b"abc", [CLIENT, (OPT_IA_NA, bytes(12) + inner)])


SILENCED = {
    "a byte": b"x",
    "an Ethernet header and nothing": GOOD[:14],
    "an IPv6 header and nothing": GOOD[:54],
    "half a message": GOOD[:70],
    "IPv4": patched(12, 8, 0),
    "IP version 4 in IPv6": patched(_IP, 0x45),
    "a length of nothing": patched(_IP + 4, 0, 0),
    "a length beyond the frame": patched(_IP + 4, 0xFF, 0xFF),
    "a hop-by-hop header": patched(_IP + 6, 0),
    "a fragment header": patched(_IP + 6, 44),
    "a routing header": patched(_IP + 6, 43),
    "TCP": patched(_IP + 6, 6),
    "a UDP length of nothing": patched(_UDP + 4, 0, 0),
    "a UDP length beyond the packet": patched(_UDP + 4, 0xFF, 0xFF),
    "from nobody": patched(_IP + 8, *bytes(16)),
    "from a global address": patched(_IP + 8, *OWN.packed),
    "from another card": patched(6, 2, 0, 0, 0, 0, 9),
    "to the server alone": patched(_IP + 24, *IPv6Address("fe80::7669:7274:0:0").packed),
    "options of no length without end": in_frame(build_message(1, b"abc", [IA, *[(0, b"")] * 300])),
    "an option of 65535 bytes": in_frame(SOLICITED + b"\0\x11\xff\xff"),
    "clients upon clients": in_frame(build_message(1, b"abc", [CLIENT] * 60)),
    "associations upon associations": in_frame(build_message(1, b"abc", [CLIENT, *[IA] * 80])),
    "a relay in a relay": in_frame((b"\x0c\0" + bytes(32) + b"\0\x09\0\x20") * 30),
    "an ending that is not there": in_frame(SOLICITED + b"\0"),
    "an echo": icmp(b"\x80" + bytes(7)),
    "a router's advertisement": icmp(b"\x86" + bytes(15)),
    "a solicitation with an option of no length": icmp(b"\x85" + bytes(7) + b"\1\0" * 100),
    "a solicitation with a wrong checksum": patched(56, 0, 0, of=ROUTER_SOLICITATION),
}  # fmt: skip

STRANGE = {
    "an address in an address": in_frame(nested(40)),
    "every option that there is": in_frame(
        build_message(1, b"abc", [CLIENT, IA, *((c, b"") for c in range(20, 200) if c != 25)])),
    "asks for everything": in_frame(build_message(1, b"abc", [CLIENT, IA, (6, bytes(range(250)))])),
    "names itself in escape sequences": in_frame(build_message(1, b"abc", [(1, b"\x1b[2J;rm -rf /"), IA])),
    "wants eight of all kinds": in_frame(
        build_message(1, b"abc", [CLIENT, *[IA, (4, b"\0\0\0\1"), (25, bytes(12))] * 2, IA, IA])),
    "has sixteen addresses": in_frame(build_message(6, b"abc", [
        CLIENT, (3, bytes(12) + encode_options([address_option(IPv6Address(n), 9) for n in range(16)]))])),
    "a solicitation with a strange option": icmp(b"\x85" + bytes(7) + b"\xfe\1" + bytes(6)),
}  # fmt: skip


@pytest.mark.parametrize("sent", SILENCED.values(), ids=SILENCED)
def test_a_frame_that_is_not_this_guests_request_gets_no_answer(node: Node, sent: bytes) -> None:
    node.hostile.guest.send(sent)
    assert node.answers() == []
    assert node.serves_the_other()


@pytest.mark.parametrize("sent", STRANGE.values(), ids=STRANGE)
def test_a_strange_request_gets_one_answer_that_fits_every_link(node: Node, sent: bytes) -> None:
    node.hostile.guest.send(sent)
    (answer,) = node.answers()
    assert len(answer) <= 14 + frame.LEAST_MTU
    assert node.serves_the_other()


def test_damaged_requests_do_not_stop_the_server() -> None:
    dice = random.Random(11)  # the same at each run
    silent = GuestNic(_Nowhere(), None, LEASE, Announcer(ANNOUNCEMENT, _NO_ENDS, (), 0.0))  # type: ignore[arg-type]
    for _ in range(3000):
        data = bytearray(dice.choice([GOOD, ROUTER_SOLICITATION, *STRANGE.values()]))
        for _ in range(dice.randrange(1, 8)):
            data[dice.randrange(len(data))] = dice.choice([0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)])
        cut = bytes(data[: dice.choice([len(data), dice.randrange(len(data))])])
        silent.take(silent.tap, cut, 1.0)


class _Nowhere:
    def send(self, data: bytes) -> int:
        assert len(data) <= 14 + frame.LEAST_MTU
        return len(data)


_NO_ENDS = Ends(_Nowhere().send, lambda data: None, lambda address, mac, then: then(True))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("noise", [GOOD, ROUTER_SOLICITATION], ids=["DHCPv6", "router solicitations"])
def test_a_flood_is_rate_limited_and_the_other_guest_is_served(node: Node, noise: bytes) -> None:
    node.flood(noise)
    assert node.serves_the_other()
    wait_until(lambda: not node.is_read(), 60, "the flood is not read for a while")
    assert node.serves_the_other()


def test_a_message_is_as_long_as_its_datagram_says(node: Node) -> None:
    """Bytes after it in the frame are padding."""
    node.hostile.guest.send(GOOD + struct.pack("!HH", 1, 65535))
    (answer,) = node.answers()
    assert frame.parse(answer).payload[8] == ADVERTISE
