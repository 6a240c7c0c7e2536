"""IPv6 over Ethernet, just enough for neighbour discovery and DHCPv6. Pure: any bytes give a Packet or BadPacket."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv6Address

from tapmanager.dhcp.packet import BadPacket, checksum

UDP, ICMP = 17, 58
ALL_NODES, DHCP_SERVERS = IPv6Address("ff02::1"), IPv6Address("ff02::1:2")
NOBODY = IPv6Address(0)
CLIENT_PORT, SERVER_PORT = 546, 547
# Of neighbour discovery: a packet that came through a router has less.
OWN_LINK = 255
# What each link carries whole (RFC 8200, 5).
LEAST_MTU = 1280
HEADER = 40
_ETHERTYPE = 0x86DD
_ETHERNET = 14
CHECKSUM_AT = {UDP: 6, ICMP: 2}
_SHORTEST = {UDP: 8, ICMP: 4}


@dataclass(frozen=True, slots=True)
class Packet:
    """`payload` is the UDP datagram with its header, or the ICMPv6 message; its checksum is `build`'s."""

    source_mac: bytes
    target_mac: bytes
    source: IPv6Address
    target: IPv6Address
    protocol: int
    payload: bytes
    hop_limit: int = OWN_LINK


def parse(data: bytes) -> Packet:
    """Raises BadPacket, for extension headers too. Of UDP the checksum is not checked (see `dhcp.frame.parse`)."""
    start = _ETHERNET + HEADER
    if len(data) < start or struct.unpack_from("!H", data, 12)[0] != _ETHERTYPE:
        raise BadPacket("not IPv6 over Ethernet")
    first, length, protocol, hops, source, target = struct.unpack_from("!IHBB16s16s", data, _ETHERNET)
    if first >> 28 != 6 or start + length > len(data):
        raise BadPacket("a bad IPv6 header")
    if protocol not in _SHORTEST or length < _SHORTEST[protocol]:
        raise BadPacket("neither UDP nor ICMPv6")
    payload = data[start : start + length]
    packet = Packet(data[6:12], data[:6], IPv6Address(source), IPv6Address(target), protocol, payload, hops)
    if protocol == ICMP and checksum(_pseudo_header(packet) + payload) != 0:
        raise BadPacket("a wrong checksum")
    return packet


def build(packet: Packet) -> bytes:
    at = CHECKSUM_AT[packet.protocol]
    bare = packet.payload[:at] + b"\0\0" + packet.payload[at + 2 :]
    total = checksum(_pseudo_header(packet) + bare) or 0xFFFF  # 0 would say "no checksum"
    head = struct.pack("!IHBB", 6 << 28, len(bare), packet.protocol, packet.hop_limit)
    return (
        packet.target_mac
        + packet.source_mac
        + struct.pack("!H", _ETHERTYPE)
        + head
        + packet.source.packed
        + packet.target.packed
        + bare[:at]
        + struct.pack("!H", total)
        + bare[at + 2 :]
    )


def _pseudo_header(packet: Packet) -> bytes:
    return packet.source.packed + packet.target.packed + struct.pack("!II", len(packet.payload), packet.protocol)


def group_mac(group: IPv6Address) -> bytes:
    """RFC 2464, 7."""
    return b"\x33\x33" + group.packed[12:]


def udp(source_port: int, target_port: int, body: bytes) -> bytes:
    return struct.pack("!HHHH", source_port, target_port, 8 + len(body), 0) + body


def from_udp(payload: bytes) -> tuple[int, bytes]:
    """(the target's port, the body). Raises BadPacket."""
    _, port, length = struct.unpack_from("!HHH", payload)
    if not 8 <= length <= len(payload):
        raise BadPacket("a bad UDP length")
    return port, payload[8:length]


# Link-local addresses on guests' taps that are nobody's on the network.
#
# A router advertisement has to come from a link-local address, to which the guest then sends: it is the router. Where
# the plugin's gateway has such an address, that is it. Most plugins' have a global one alone (`fd00::1`), and what
# link-local address is behind it cannot be asked. So an address of ours stands for it: the bridge answers for it with
# a MAC that is ours too, and what comes for that goes to the gateway's (`links.neighbours`, `links.gateway_rewrite`);
# the guard (`links.dhcp_guard`) keeps everybody else from using the address. It is the same in all pods: no VM can
# take another's.

# "virt", then which. /120: one byte is free.
_FIRST = IPv6Address("fe80::7669:7274:0:0")
STAND_IN_PREFIX = _FIRST.packed[:15]
# The DHCPv6 server, and who advertises where there is no router; then the routers.
STAND_IN_SERVER = 0
STAND_IN_MOST = 255


def stand_in_mac(number: int) -> bytes:
    """A router's. Locally administered."""
    return b"\x02virt" + bytes([number])


def stand_in_number_of(address: IPv6Address) -> int:
    """The other way round."""
    return address.packed[15]


def stand_in_address(number: int) -> IPv6Address:
    """`number`: SERVER, or a router's from 1 to MOST."""
    return _FIRST + number
