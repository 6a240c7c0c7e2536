"""Each frame of a guest to the DHCP server on its tap gets one small answer or none, and the other guest is served."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

import pytest
from fakes.guest_taps import TwoGuests, two_guests
from podclient import wait_until

from tapmanager.dhcp import packet
from tapmanager.dhcp.lease_plan import Lease, answer
from tapmanager.dhcp.opened import GuestNic
from tapmanager.dhcp.packet import (
    BROADCAST_IP,
    BROADCAST_MAC,
    CLIENT_PORT,
    Datagram,
    Message,
    build_frame,
    parse_frame,
)

pytestmark = pytest.mark.hostile

MAC = bytes.fromhex("0a58c0a80002")
GATEWAY = IPv4Address("10.88.0.1")
LEASE = Lease(
    mac=MAC,
    server_mac=bytes.fromhex("020000000002"),
    server=GATEWAY,
    interface=IPv4Interface("10.88.0.5/16"),
    mtu=1450,
    routes=((IPv4Network("0.0.0.0/0"), GATEWAY),),
    dns=(IPv4Address("10.96.0.10"),),
    searches=("default.svc.cluster.local", "cluster.local"),
    hostname="web-0",
)


class Node(TwoGuests):
    def answers(self) -> list[bytes]:
        last = in_frame(discover(xid=0xC0FFEE))
        return self.answers_before(last, lambda sent: packet.parse(parse_frame(sent).payload).xid == 0xC0FFEE)

    def serves_the_other(self) -> bool:
        self.other.guest.send(in_frame(discover()))
        offer = packet.parse(parse_frame(self.other.guest.recv(65536)).payload)
        return (offer.kind, offer.yiaddr) == (packet.OFFER, LEASE.interface.ip)


@pytest.fixture
def node() -> Iterator[Node]:
    with two_guests(0x0800, lambda tap: GuestNic(tap, LEASE)) as parts:  # type: ignore[arg-type]
        yield Node(*parts)


def discover(**changes: object) -> Message:
    options = {packet.OPT_TYPE: bytes([packet.DISCOVER])}
    return dataclasses.replace(Message(packet.BOOTREQUEST, 0x1234, MAC, options=options), **changes)


def with_options(**options: bytes) -> Message:
    """A request with options by number: o61=..."""
    return discover(options={packet.OPT_TYPE: bytes([packet.DISCOVER]), **{int(k[1:]): v for k, v in options.items()}})


def in_frame(message: Message | bytes, port: int = 67) -> bytes:
    payload = message if isinstance(message, bytes) else packet.build(message)
    return build_frame(Datagram(MAC, BROADCAST_MAC, packet.ANY, BROADCAST_IP, CLIENT_PORT, port, payload))


GOOD = in_frame(discover())
_IP, _UDP, _DHCP = 14, 34, 42
_OPTIONS = 240


def patched(at: int, *values: int) -> bytes:
    """The valid request with these bytes at that offset of its frame."""
    return GOOD[:at] + bytes(values) + GOOD[at + len(values) :]


def raw_options(area: bytes) -> bytes:
    return in_frame(packet.build(discover())[:_OPTIONS] + area)


SILENCED = {
    "a byte": b"x",
    "an Ethernet header and nothing": GOOD[:14],
    "an IPv4 header and nothing": GOOD[:34],
    "half a DHCP message": GOOD[:200],
    "IPv6": patched(12, 0x86, 0xDD),
    "an IPv4 header of no words": patched(_IP, 0x40),
    "an IPv4 header of fifteen words": patched(_IP, 0x4F),
    "IP version 9": patched(_IP, 0x95),
    "an IPv4 length of nothing": patched(_IP + 2, 0, 0),
    "an IPv4 length beyond the frame": patched(_IP + 2, 0xFF, 0xFF),
    "a first fragment": patched(_IP + 6, 0x20, 0),
    "a later fragment": patched(_IP + 6, 0, 1),
    "TCP": patched(_IP + 9, 6),
    "a UDP length of nothing": patched(_UDP + 4, 0, 0),
    "a UDP length beyond the datagram": patched(_UDP + 4, 0xFF, 0xFF),
    "another port": in_frame(discover(), port=68),
    "no magic cookie": patched(_DHCP + 236, 0, 0, 0, 0),
    "a token ring card": patched(_DHCP + 1, 6),
    "an address of sixteen bytes": patched(_DHCP + 2, 16),
    "an address of no bytes": patched(_DHCP + 2, 0),
    "an answer instead of a request": in_frame(discover(op=packet.BOOTREPLY)),
    "the address of another guest": in_frame(discover(chaddr=b"\x0a\x58\xc0\xa8\x00\x03")),
    "a relay's request": in_frame(discover(giaddr=GATEWAY)),
    "no message type": raw_options(b"\xff"),
    "a message type of no bytes": raw_options(bytes([53, 0, 255])),
    "a message type of two bytes": raw_options(bytes([53, 2, 1, 1, 255])),
    "message type 0": raw_options(bytes([53, 1, 0, 255])),
    "message type 255": raw_options(bytes([53, 1, 255, 255])),
    "a message type that comes twice": raw_options(bytes([53, 1, 1, 53, 1, 3, 255])),
    "an option cut short": raw_options(bytes([53, 1, 1, 61])),
    "an option longer than the message": raw_options(bytes([53, 1, 1, 61, 255, 1])),
    "an offer": raw_options(bytes([53, 1, packet.OFFER, 255])),
    "a request for nothing": raw_options(bytes([53, 1, packet.REQUEST, 255])),
    "a request to another server": raw_options(bytes([53, 1, 3, 54, 4, 1, 2, 3, 4, 50, 4, 10, 88, 0, 5, 255])),
    "a decline": raw_options(bytes([53, 1, packet.DECLINE, 255])),
    "a release": raw_options(bytes([53, 1, packet.RELEASE, 255])),
    "an inform without an address": raw_options(bytes([53, 1, packet.INFORM, 255])),
    "options that overload into rubbish": raw_options(bytes([52, 1, 3, 53, 1, 1, 255]))[:_DHCP + 44]
    + b"\x3d\xff" * 96 + raw_options(bytes([52, 1, 3, 53, 1, 1, 255]))[_DHCP + 236 :],
}  # fmt: skip

SMALL = {
    "asks for every option": with_options(o55=bytes(range(256))[:255]),
    "takes no more than a byte": with_options(o57=b"\0\1"),
    "takes 65535 bytes": with_options(o57=b"\xff\xff"),
    "names a size of three bytes": with_options(o57=b"\xff\xff\xff"),
    "names itself in no bytes": with_options(o61=b""),
    "names itself in a kilobyte": with_options(o61=b"x" * 1000),
    "names itself in zeros": with_options(o61=b"\0" * 255),
    "names a host in escape sequences": with_options(o12=b"\x1b[2J;rm -rf /"),
    "wants an address of three bytes": with_options(o50=b"\1\2\3"),
    "has every option": discover(options={53: b"\1", **dict.fromkeys((c for c in range(1, 254) if c not in (52, 53)), b"")}),
    "has come through 255 hops": discover(hops=255, secs=65535, flags=0xFFFF),
    "has an address that is not its own": discover(ciaddr=IPv4Address("8.8.8.8")),
}  # fmt: skip


@pytest.mark.parametrize("sent", SILENCED.values(), ids=SILENCED)
def test_a_frame_that_is_not_this_guests_request_gets_no_answer(node: Node, sent: bytes) -> None:
    node.hostile.guest.send(sent)
    assert node.answers() == []
    assert node.serves_the_other()


@pytest.mark.parametrize("asked", SMALL.values(), ids=SMALL)
def test_a_strange_request_gets_one_answer_that_fits_a_frame(node: Node, asked: Message) -> None:
    node.hostile.guest.send(in_frame(asked))
    (sent,) = node.answers()
    assert len(sent) <= 1514
    offer = packet.parse(parse_frame(sent).payload)
    assert (offer.kind, offer.yiaddr, offer.chaddr) == (packet.OFFER, LEASE.interface.ip, MAC)
    assert node.serves_the_other()


@pytest.mark.parametrize("wanted", ["0.0.0.1", "10.88.0.6", "255.255.255.255", "127.0.0.1"])
def test_a_request_for_another_guests_address_is_refused(node: Node, wanted: str) -> None:
    kind = {packet.OPT_TYPE: bytes([packet.REQUEST]), packet.OPT_REQUESTED_IP: IPv4Address(wanted).packed}
    node.hostile.guest.send(in_frame(discover(options=kind)))
    (sent,) = node.answers()
    assert packet.parse(parse_frame(sent).payload).kind == packet.NAK
    assert node.serves_the_other()


def test_a_truncated_request_gets_no_answer() -> None:
    assert answer(GOOD, LEASE) is not None
    assert [size for size in range(len(GOOD)) if answer(GOOD[:size], LEASE) is not None] == []


def test_a_flood_of_requests_is_rate_limited_and_the_other_guest_is_served(node: Node) -> None:
    node.flood(GOOD)
    assert node.serves_the_other()
    wait_until(lambda: not node.is_read(), 60, "the flood is not read for a while")
    assert node.serves_the_other()
