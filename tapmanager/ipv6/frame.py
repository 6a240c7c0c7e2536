"""IPv6 over Ethernet, as far as neighbour discovery and DHCPv6 need it, and stand-in addresses for routers. Pure: any bytes
give a Packet or BadPacket."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv6Address

from tapmanager.dhcp.packet import BadPacket, checksum

UDP, ICMP = 17, 58
ALL_NODES, DHCP_SERVERS = IPv6Address("ff02::1"), IPv6Address("ff02::1:2")
NOBODY = IPv6Address(0)
CLIENT_PORT, SERVER_PORT = 546, 547
# The hop limit of neighbour discovery. A packet that crossed a router has a lower one.
OWN_LINK = 255
# The packet size that every link carries without fragmentation (RFC 8200, 5).
LEAST_MTU = 1280
HEADER = 40
_ETHERTYPE = 0x86DD
_ETHERNET = 14
CHECKSUM_AT = {UDP: 6, ICMP: 2}
_SHORTEST = {UDP: 8, ICMP: 4}


@dataclass(frozen=True, slots=True)
class Packet:
    """`payload`: the UDP datagram with its header, or the ICMPv6 message. `build` sets its checksum."""

    source_mac: bytes
    target_mac: bytes
    source: IPv6Address
    target: IPv6Address
    protocol: int
    payload: bytes
    hop_limit: int = OWN_LINK


def parse(data: bytes) -> Packet:
    """Raises BadPacket, also for extension headers. Does not check UDP's checksum (see `dhcp.packet.parse_frame`)."""
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
    total = checksum(_pseudo_header(packet) + bare) or 0xFFFF  # 0 would mean "no checksum"
    link = packet.target_mac + packet.source_mac + struct.pack("!H", _ETHERTYPE)
    head = struct.pack("!IHBB", 6 << 28, len(bare), packet.protocol, packet.hop_limit)
    addresses = packet.source.packed + packet.target.packed
    return link + head + addresses + bare[:at] + struct.pack("!H", total) + bare[at + 2 :]


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


# Stand-ins: link-local addresses that exist only on guests' taps, not on the network.
#
# A router advertisement must come from a link-local address, which the guest then uses as its router. Some plugins' gateways have
# one. Most have only a global address (`fd00::1`), and their link-local address cannot be found out. Then a stand-in address
# represents the gateway: the bridge answers for it with a stand-in MAC, and frames to that MAC are rewritten to the gateway's
# (`links.kernel_links`, `links.filters`). The guard (`links.filters`) keeps all others from using the address. The addresses are
# the same in all pods, so no VM can take another one's.

# "virt", then the number. /120: one byte for the number.
_FIRST = IPv6Address("fe80::7669:7274:0:0")
STAND_IN_PREFIX = _FIRST.packed[:15]
# The number of the DHCPv6 server, which also advertises if there is no router. The routers' numbers follow.
STAND_IN_SERVER = 0
STAND_IN_MOST = 255


def stand_in_mac(number: int) -> bytes:
    """The MAC of a stand-in. Locally administered."""
    return b"\x02virt" + bytes([number])


def stand_in_number_of(address: IPv6Address) -> int:
    """The number of a stand-in address."""
    return address.packed[15]


def stand_in_address(number: int) -> IPv6Address:
    """`number`: SERVER, or a router's from 1 to MOST."""
    return _FIRST + number
