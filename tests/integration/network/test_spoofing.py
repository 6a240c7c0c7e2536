"""A guest cannot send frames with a MAC, an address or a role that is not its own. A stand-in on the tap's descriptor
plays the guest."""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

import pytest
from tap_node import TapNode, sandbox
from toy_guest import ToyGuest, checksum

from tapmanager import protocol
from tapmanager.dhcp import packet

pytestmark = pytest.mark.network

BROADCAST = b"\xff" * 6
STRANGER = bytes.fromhex("02deadbeef01")
OTHER = IPv4Address("10.89.250.9")
OTHER_6, OWN_LINK_LOCAL = IPv6Address("fd00:89::bad"), IPv6Address("fe80::1234")
ALL_NODES = IPv6Address("ff02::1")
ARP, IPV4, IPV6 = b"\x08\x06", b"\x08\x00", b"\x86\xdd"


def arp(mac: bytes, sender_mac: bytes, sender: IPv4Address, marker: bytes) -> bytes:
    """An ARP request whose target address is the marker."""
    return BROADCAST + mac + ARP + b"\0\1\x08\0\6\4\0\1" + sender_mac + sender.packed + bytes(6) + marker


def ipv4(mac: bytes, source: IPv4Address, marker: bytes, protocol_number: int = 17) -> bytes:
    head = struct.pack("!BBHHHBBH", 0x45, 0, 32, 1, 0, 64, protocol_number, 0) + source.packed + b"\xff" * 4
    head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
    return BROADCAST + mac + IPV4 + head + struct.pack("!HHHH", 9, 9, 12, 0) + marker


def ipv6(mac: bytes, source: IPv6Address, kind: int, body: bytes, marker: bytes, hop_by_hop: bool = False) -> bytes:
    """An ICMPv6 message; `hop_by_hop`: after an extension header."""
    message = bytes([kind, 0, 0, 0]) + body + marker
    pseudo = source.packed + ALL_NODES.packed + len(message).to_bytes(4, "big") + b"\0\0\0\x3a"
    message = message[:2] + struct.pack("!H", checksum(pseudo + message)) + message[4:]
    following, extension = (b"\0", b"\x3a\0\1\4\0\0\0\0") if hop_by_hop else (b"\x3a", b"")
    length = len(extension) + len(message)
    head = b"\x60\0\0\0" + length.to_bytes(2, "big") + following + b"\xff" + source.packed + ALL_NODES.packed
    return b"\x33\x33\0\0\0\1" + mac + IPV6 + head + extension + message


def neighbour(mac: bytes, source: IPv6Address, target: IPv6Address, marker: bytes) -> bytes:
    """A neighbour advertisement: `target` has `mac`."""
    return ipv6(mac, source, 136, b"\x20\0\0\0" + target.packed + b"\2\1" + mac, marker)


@dataclass
class Wire:
    """The guest's tap, and the bridge's side of the node."""

    guest: ToyGuest
    outside: socket.socket
    own: IPv4Address
    own_6: IPv6Address
    count: int = 0

    def marker(self) -> bytes:
        self.count += 1
        return b"\x0a\x59" + struct.pack("!H", self.count)

    def passes(self, frame: bytes, marker: bytes) -> bool:
        """Whether the frame passes; a frame that surely passes is sent after it, so the test need not wait for a dropped
        one."""
        self.guest.send(frame)
        last = self.marker()
        self.guest.send(arp(self.guest.mac, self.guest.mac, self.own, last))
        found = False
        while True:
            seen = self.outside.recv(2048)
            found = found or marker in seen
            if last in seen:
                return found

    def refused(self, *frames: tuple[str, bytes, bytes]) -> list[str]:
        return [name for name, frame, marker in frames if not self.passes(frame, marker)]


def made(node: TapNode, **pod: object) -> tuple[str, dict[str, object]]:
    ipam = {
        "type": "host-local",
        "dataDir": str(node.leases),
        "ranges": [[{"subnet": f"{node.subnet}.0/24"}], [{"subnet": "fd00:89::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
    }
    node.configure(node.bridge_plugin(ipam=ipam, ipMasq=False))
    which = sandbox()
    return which, node.attach(which, **pod)


def wire(node: TapNode, which: str, network: dict[str, object], link: str = "") -> Iterator[Wire]:
    with (
        node.guest(which, network) as guest,
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as outside,
    ):
        outside.bind((link or node.bridge, 3))
        outside.settimeout(60)
        guest.boot()
        four, six = network["ips"]
        yield Wire(guest, outside, IPv4Address(four), IPv6Address(six))
    node.release(which)


def everything(wire: Wire) -> list[tuple[str, bytes, bytes]]:
    """All frames that a guest might send, forged or not, by name; each contains a marker."""
    mac, own, own_6 = wire.guest.mac, wire.own, wire.own_6
    marks = [wire.marker() for _ in range(20)]
    frames = [
        ("own arp", arp(mac, mac, own, marks[0])),
        ("arp probe", arp(mac, mac, IPv4Address(0), marks[1])),
        ("own packet", ipv4(mac, own, marks[2])),
        ("own icmpv6", ipv6(mac, own_6, 128, b"\0\0\0\1", marks[3])),
        ("link-local icmpv6", ipv6(mac, OWN_LINK_LOCAL, 128, b"\0\0\0\1", marks[4])),
        ("solicitation without address", ipv6(mac, IPv6Address(0), 135, bytes(4) + own_6.packed, marks[5])),
        ("own advertisement", neighbour(mac, own_6, own_6, marks[6])),
        ("link-local advertisement", neighbour(mac, OWN_LINK_LOCAL, OWN_LINK_LOCAL, marks[7])),
        ("other mac", arp(STRANGER, STRANGER, own, marks[8])),
        ("other mac in arp", arp(mac, STRANGER, own, marks[9])),
        ("other arp", arp(mac, mac, OTHER, marks[10])),
        ("gateway's arp", arp(mac, mac, IPv4Address(f"{str(own).rsplit('.', 1)[0]}.1"), marks[11])),
        ("other packet", ipv4(mac, OTHER, marks[12])),
        ("nobody's packet", ipv4(mac, IPv4Address(0), marks[13])),
        ("other icmpv6", ipv6(mac, OTHER_6, 128, b"\0\0\0\1", marks[14])),
        ("router advertisement", ipv6(mac, OWN_LINK_LOCAL, 134, bytes(12), marks[15])),
        ("hidden router advertisement", ipv6(mac, OWN_LINK_LOCAL, 134, bytes(12), marks[16], hop_by_hop=True)),
        ("redirect", ipv6(mac, OWN_LINK_LOCAL, 137, bytes(36), marks[17])),
        ("other advertisement", neighbour(mac, own_6, OTHER_6, marks[18])),
        ("vlan", BROADCAST + mac + b"\x81\0\0\7" + ipv4(mac, OTHER, marks[19])[12:]),
    ]
    return [(name, frame, mark) for (name, frame), mark in zip(frames, marks, strict=True)]


FORGED_MACS = ["other mac", "other mac in arp"]
# Only tapmanager may send these, whatever the filter.
ADVERTISED = ["router advertisement", "hidden router advertisement"]
FORGED = [
    *FORGED_MACS,
    "other arp", "gateway's arp", "other packet", "nobody's packet", "other icmpv6", "router advertisement",
    "hidden router advertisement", "redirect", "other advertisement", "vlan",
]  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "stopped"), [("off", ADVERTISED), ("mac", FORGED_MACS + ADVERTISED), ("mac+ip", FORGED)]
)
def test_forged_packets_are_dropped_and_all_others_pass(quiet_node: TapNode, chosen: str, stopped: list[str]) -> None:
    quiet_node.start("--filter", chosen)
    for one in wire(quiet_node, *made(quiet_node)):
        assert one.refused(*everything(one)) == stopped


def test_the_filter_stays_across_a_restart_of_tapmanager_and_dhcp_works_again(quiet_node: TapNode) -> None:
    quiet_node.start()
    for one in wire(quiet_node, *made(quiet_node)):
        quiet_node.stop(signal.SIGKILL)
        assert one.refused(*everything(one)) == FORGED
        quiet_node.start()
        assert one.refused(*everything(one)) == FORGED
        _, ack = one.guest.dhcp(packet.REQUEST, ciaddr=one.own)
        assert (ack.kind, ack.yiaddr) == (packet.ACK, one.own)
        gateway = IPv4Address(f"{quiet_node.subnet}.1")
        one.guest.ping(one.guest.resolve(gateway), gateway)


def test_a_pod_may_have_a_weaker_filter_if_the_operator_allows_it(quiet_node: TapNode) -> None:
    quiet_node.start("--filter", "mac", "--filter-by-pod", "true")
    for one in wire(quiet_node, *made(quiet_node, filter="off")):
        assert one.refused(*everything(one)) == ADVERTISED


def test_a_pod_may_always_have_a_stronger_filter(quiet_node: TapNode) -> None:
    quiet_node.start("--filter", "off")
    for one in wire(quiet_node, *made(quiet_node, filter="mac+ip")):
        assert one.refused(*everything(one)) == FORGED


def test_a_weaker_filter_that_the_operator_does_not_allow_is_refused_by_name(quiet_node: TapNode) -> None:
    quiet_node.start()
    with pytest.raises(
        protocol.RemoteError, match=r"asks for the network filter mac, .* tapmanager.filter_by_pod"
    ) as told:
        made(quiet_node, filter="mac")
    assert told.value.kind == "permission"
    assert quiet_node.listed() == []


def test_no_guest_can_impersonate_a_link_local_gateway(quiet_node: TapNode) -> None:
    which = sandbox()
    link = f"sp{which[:9]}"
    quiet_node.plugin("routed", f"""
        inside() {{ ip -n $(basename $CNI_NETNS) "$@"; }}
        test $CNI_COMMAND = DEL && {{ ip link del {link}; exit 0; }}
        ip link add {link} type veth peer eth0 netns $(basename $CNI_NETNS)
        ip link set {link} up && inside link set eth0 up
        inside addr add 10.90.33.2/32 dev eth0 && inside addr add fd00:90:33::2/128 dev eth0 nodad
        inside route add default via fe80::1 dev eth0
        echo '{{"cniVersion": "1.0.0", "interfaces": [{{"name": "eth0", "sandbox": "'$CNI_NETNS'"}}],
                "ips": [{{"address": "10.90.33.2/32", "interface": 0}}, {{"address": "fd00:90:33::2/128", "interface": 0}}]}}'
    """)  # fmt: skip
    quiet_node.configure({"type": "routed"})
    quiet_node.start()
    for one in wire(quiet_node, which, quiet_node.attach(which), link):
        mac, gateway, marks = one.guest.mac, IPv6Address("fe80::1"), [one.marker() for _ in range(3)]
        assert one.refused(
            ("as sender", ipv6(mac, gateway, 128, b"\0\0\0\1", marks[0]), marks[0]),
            ("in an advertisement", neighbour(mac, one.own_6, gateway, marks[1]), marks[1]),
            ("another", ipv6(mac, OWN_LINK_LOCAL, 128, b"\0\0\0\1", marks[2]), marks[2]),
        ) == ["as sender", "in an advertisement"]  # fmt: skip
