"""DHCPv4 messages (RFC 2131, 2132, 3396) as values and bytes. Pure: any bytes give a Message or BadPacket."""

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
# BOOTP's message is 300 bytes at least, and some relays and clients still drop shorter ones (RFC 1542, 2.1).
_SHORTEST = 300

ANY = IPv4Address(0)


class BadPacket(ValueError):
    """These bytes are not a message of the kind wanted."""


@dataclass(frozen=True, slots=True)
class Message:
    """`chaddr` is the client's MAC; `options` has no pad, end, overload; long ones are whole; order of first appearance."""

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
        """The option's value if it is one address."""
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
    """Adds to `options`; the parts of an option that appears again are joined (RFC 3396). A missing end is forgiven."""
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
    """At least 300 bytes; options in the mapping's order, long ones split (RFC 3396)."""
    fixed = _FIXED.pack(
        message.op,
        1,
        6,
        message.hops,
        message.xid,
        message.secs,
        message.flags,
        message.ciaddr.packed,
        message.yiaddr.packed,
        message.siaddr.packed,
        message.giaddr.packed,
        message.chaddr,
        b"",
        b"",
        _COOKIE,
    )
    data = fixed + b"".join(encode_option(code, value) for code, value in message.options.items()) + bytes([_END])
    return data.ljust(_SHORTEST, b"\0")


def encode_option(code: int, value: bytes) -> bytes:
    """In pieces of at most 255 bytes; an empty value is one empty piece."""
    pieces = [value[at : at + 255] for at in range(0, len(value), 255)] or [b""]
    return b"".join(bytes([code, len(piece)]) + piece for piece in pieces)


def encode_search(domains: tuple[str, ...]) -> bytes:
    """Option 119 (RFC 3397): DNS names one after the other, each closed by its root label. Names that DNS does not allow are
    left out. No compression: RFC 3397 allows it, not all clients read it."""
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
