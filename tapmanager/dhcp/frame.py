"""UDP over IPv4 over Ethernet, just enough for DHCP. Pure: any bytes give a Datagram or BadPacket."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address

from tapmanager.dhcp.packet import BadPacket

BROADCAST_MAC = b"\xff" * 6
BROADCAST_IP = IPv4Address("255.255.255.255")
SERVER_PORT, CLIENT_PORT = 67, 68
_ETHERTYPE_IPV4 = 0x0800
_UDP = 17


@dataclass(frozen=True, slots=True)
class Datagram:
    source_mac: bytes
    target_mac: bytes
    source: IPv4Address
    target: IPv4Address
    source_port: int
    target_port: int
    payload: bytes


def parse(data: bytes) -> Datagram:
    """Raises BadPacket. Checksums are not checked: a guest with checksum offload leaves UDP's to the host, which for a frame
    that never leaves the host means that nobody fills it in."""
    if len(data) < 14 + 20 or struct.unpack_from("!H", data, 12)[0] != _ETHERTYPE_IPV4:
        raise BadPacket("not IPv4 over Ethernet")
    first, _, total, _, fragment, _, protocol, _, source, target = struct.unpack_from("!BBHHHBBH4s4s", data, 14)
    header = (first & 0x0F) * 4
    if first >> 4 != 4 or header < 20 or total < header + 8 or 14 + total > len(data):
        raise BadPacket("a bad IPv4 header")
    if protocol != _UDP or fragment & 0x3FFF:  # more fragments, or an offset
        raise BadPacket("not a whole UDP datagram")
    source_port, target_port, length, _ = struct.unpack_from("!HHHH", data, 14 + header)
    if length < 8 or header + length > total:
        raise BadPacket("a bad UDP length")
    payload = data[14 + header + 8 : 14 + header + length]
    return Datagram(data[6:12], data[0:6], IPv4Address(source), IPv4Address(target), source_port, target_port, payload)


def build(datagram: Datagram) -> bytes:
    """With both checksums."""
    length = 8 + len(datagram.payload)
    udp = struct.pack("!HHHH", datagram.source_port, datagram.target_port, length, 0) + datagram.payload
    pseudo = datagram.source.packed + datagram.target.packed + struct.pack("!BBH", 0, _UDP, length)
    total = checksum(pseudo + udp) or 0xFFFF  # 0 would say "no checksum"
    udp = udp[:6] + struct.pack("!H", total) + udp[8:]
    ip = (
        struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, 0, 0, 64, _UDP, 0)
        + datagram.source.packed
        + datagram.target.packed
    )
    ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
    return datagram.target_mac + datagram.source_mac + struct.pack("!H", _ETHERTYPE_IPV4) + ip + udp


def checksum(data: bytes) -> int:
    """RFC 1071."""
    if len(data) % 2:
        data += b"\0"
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
