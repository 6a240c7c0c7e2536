"""Parses and builds DHCPv4 messages (RFC 2131, 2132, 3396) and their frames. Pure: any bytes give a value or BadPacket."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address

BOOTREQUEST, BOOTREPLY = 1, 2
DISCOVER, OFFER, REQUEST, DECLINE, ACK, NAK, RELEASE, INFORM = range(1, 9)

OPT_MASK, OPT_ROUTER, OPT_DNS, OPT_HOSTNAME, OPT_DOMAIN, OPT_MTU = 1, 3, 6, 12, 15, 26
OPT_BROADCAST, OPT_REQUESTED_IP, OPT_LEASE_TIME, OPT_OVERLOAD, OPT_TYPE, OPT_SERVER_ID = 28, 50, 51, 52, 53, 54
OPT_PARAMETERS, OPT_MESSAGE, OPT_MAX_SIZE, OPT_T1, OPT_T2, OPT_CLIENT_ID = 55, 56, 57, 58, 59, 61
OPT_SEARCH, OPT_CLASSLESS_ROUTES = 119, 121
_PAD, _END = 0, 255

_FIXED = struct.Struct("!BBBBIHH4s4s4s4s16s64s128s4s")
_COOKIE = b"\x63\x82\x53\x63"
BROADCAST_FLAG = 0x8000
# A BOOTP message has at least 300 bytes, and some relays and clients still drop shorter ones (RFC 1542, 2.1).
_SHORTEST = 300

ANY = IPv4Address(0)


class BadPacket(ValueError):
    """The bytes are not a message of the expected kind."""


@dataclass(frozen=True, slots=True)
class Message:
    """`chaddr`: the client's MAC. `options`: without pad, end and overload, with long ones joined, in order of first
    appearance."""

    op: int
    xid: int
    chaddr: bytes
    flags: int = 0
    secs: int = 0
    hops: int = 0
    ciaddr: IPv4Address = ANY
    yiaddr: IPv4Address = ANY
    siaddr: IPv4Address = ANY
    giaddr: IPv4Address = ANY
    options: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def kind(self) -> int:
        """The message type, 0 if there is none (BOOTP)."""
        value = self.options.get(OPT_TYPE, b"")
        return value[0] if len(value) == 1 else 0

    def address(self, option: int) -> IPv4Address | None:
        """The option's value if it is a single address."""
        value = self.options.get(option, b"")
        return IPv4Address(value) if len(value) == 4 else None


def parse(data: bytes) -> Message:
    """Raises BadPacket."""
    if len(data) < _FIXED.size:
        raise BadPacket(f"{len(data)} bytes are not a DHCP message")
    (op, htype, hlen, hops, xid, secs, flags, ci, yi, si, gi, chaddr, sname, file, cookie) = _FIXED.unpack_from(data)
    if cookie != _COOKIE:
        raise BadPacket("no DHCP magic cookie")
    if htype != 1 or hlen != 6:
        raise BadPacket("not an Ethernet client")
    options: dict[int, bytes] = {}
    _read_options(data[_FIXED.size :], options)
    overload = options.pop(OPT_OVERLOAD, b"\0")
    # RFC 2131, 4.1: first "file", then "sname" continue the options.
    if overload in (b"\1", b"\3"):
        _read_options(file, options)
    if overload in (b"\2", b"\3"):
        _read_options(sname, options)
    options.pop(OPT_OVERLOAD, None)
    ips = [IPv4Address(raw) for raw in (ci, yi, si, gi)]
    return Message(op, xid, chaddr[:6], flags, secs, hops, ips[0], ips[1], ips[2], ips[3], options)


def _read_options(area: bytes, options: dict[int, bytes]) -> None:
    """Adds to `options`. Parts of a repeated option are joined (RFC 3396). A missing end is accepted."""
    at = 0
    while at < len(area) and area[at] != _END:
        code = area[at]
        if code == _PAD:
            at += 1
            continue
        if at + 1 >= len(area) or at + 2 + area[at + 1] > len(area):
            raise BadPacket(f"option {code} is cut short")
        length = area[at + 1]
        options[code] = options.get(code, b"") + area[at + 2 : at + 2 + length]
        at += 2 + length


def build(message: Message) -> bytes:
    """At least 300 bytes, with options in the mapping's order and long ones split (RFC 3396)."""
    ips = [ip.packed for ip in (message.ciaddr, message.yiaddr, message.siaddr, message.giaddr)]
    numbers = (message.op, 1, 6, message.hops, message.xid, message.secs, message.flags)
    fixed = _FIXED.pack(*numbers, *ips, message.chaddr, b"", b"", _COOKIE)
    data = fixed + b"".join(encode_option(code, value) for code, value in message.options.items()) + bytes([_END])
    return data.ljust(_SHORTEST, b"\0")


def encode_option(code: int, value: bytes) -> bytes:
    """The option in pieces of at most 255 bytes. An empty value is one empty piece."""
    pieces = [value[at : at + 255] for at in range(0, len(value), 255)] or [b""]
    return b"".join(bytes([code, len(piece)]) + piece for piece in pieces)


def encode_search(domains: tuple[str, ...]) -> bytes:
    """Option 119 (RFC 3397): DNS names, each ended by the root label. Names that DNS does not allow are skipped. No compression,
    because not all clients support it."""
    return b"".join(encoded for domain in domains if (encoded := _dns_name(domain)))


def _dns_name(domain: str) -> bytes:
    labels = domain.rstrip(".").split(".")
    try:
        raw = [label.encode("ascii") for label in labels]
    except UnicodeEncodeError:
        return b""
    encoded = b"".join(bytes([len(label) & 0xFF]) + label for label in raw) + b"\0"
    return encoded if all(1 <= len(label) <= 63 for label in raw) and len(encoded) <= 255 else b""


def encode_routes(routes: list[tuple[ipaddress.IPv4Network, IPv4Address]]) -> bytes:
    """Option 121 (RFC 3442): prefix length, the destination's significant octets, router (0.0.0.0: on-link)."""
    out = bytearray()
    for to, router in routes:
        out.append(to.prefixlen)
        out += to.network_address.packed[: (to.prefixlen + 7) // 8]
        out += router.packed
    return bytes(out)


# UDP over IPv4 over Ethernet, as far as DHCP needs it. Pure: any bytes give a Datagram or BadPacket.

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


def parse_frame(data: bytes) -> Datagram:
    """Raises BadPacket. Does not check checksums: a guest with checksum offload leaves UDP's to the host, and for a frame
    that never leaves the host nobody fills it in."""
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


def build_frame(datagram: Datagram) -> bytes:
    """With both checksums."""
    length = 8 + len(datagram.payload)
    udp = struct.pack("!HHHH", datagram.source_port, datagram.target_port, length, 0) + datagram.payload
    pseudo = datagram.source.packed + datagram.target.packed + struct.pack("!BBH", 0, _UDP, length)
    total = checksum(pseudo + udp) or 0xFFFF  # 0 would mean "no checksum"
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
