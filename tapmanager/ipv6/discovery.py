"""Neighbour discovery (RFC 4861, 4191, 8106): builds router advertisements and solicitations, and parses solicitations and
answers. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from ipaddress import IPv6Address, IPv6Network

from tapmanager.dhcp.packet import BadPacket, encode_search
from tapmanager.ipv6 import frame
from tapmanager.ipv6.frame import Packet

_ROUTER_SOLICITATION, _ROUTER_ADVERTISEMENT, _SOLICITATION, _ADVERTISEMENT = 133, 134, 135, 136
_SOURCE_MAC, _TARGET_MAC, _PREFIX, _MTU, _ROUTE, _DNS, _SEARCH = 1, 2, 3, 5, 24, 25, 31
_ON_LINK = 0x80
_MANAGED, _OTHER = 0x80, 0x40  # DHCPv6 provides addresses, and other configuration
_HOP_LIMIT = 64
_HEAD = 16  # of a router advertisement
# An option's length is in units of eight bytes.
_MOST_SERVERS = 8


def is_router_solicitation(packet: Packet) -> bool:
    """RFC 4861, 6.1.1. `packet`: from `frame.parse`."""
    if not _is_discovery(packet, _ROUTER_SOLICITATION, 8):
        return False
    options = _options(packet.payload[8:])
    return options is not None and not (packet.source == frame.NOBODY and _SOURCE_MAC in options)


def advertised(packet: Packet) -> tuple[IPv6Address, bytes] | None:
    """(address, MAC) of a neighbour advertisement (RFC 4861, 7.1.2); None for other packets."""
    if not _is_discovery(packet, _ADVERTISEMENT, 24) or packet.source == frame.NOBODY:
        return None
    options = _options(packet.payload[24:])
    if options is None:
        return None
    mac = options.get(_TARGET_MAC, packet.source_mac)
    is_unicast = len(mac) == 6 and not mac[0] & 1 and mac != bytes(6)
    return (IPv6Address(packet.payload[8:24]), mac) if is_unicast else None


def _is_discovery(packet: Packet, kind: int, shortest: int) -> bool:
    is_whole = packet.protocol == frame.ICMP and len(packet.payload) >= shortest
    return is_whole and packet.hop_limit == frame.OWN_LINK and packet.payload[:2] == bytes([kind, 0])


def _options(area: bytes) -> dict[int, bytes] | None:
    """The options by number, without number and length; None if one has length zero or is truncated."""
    found: dict[int, bytes] = {}
    at = 0
    while at < len(area):
        length = area[at + 1] * 8 if at + 1 < len(area) else 0
        if not length or at + length > len(area):
            return None
        found.setdefault(area[at], area[at + 2 : at + length])
        at += length
    return found


def solicitation(target: IPv6Address, source: IPv6Address, mac: bytes) -> bytes:
    """The frame that asks for the MAC of `target`."""
    group = IPv6Address(b"\xff\2" + bytes(9) + b"\1\xff" + target.packed[13:])
    body = struct.pack("!BBHI", _SOLICITATION, 0, 0, 0) + target.packed + _option(_SOURCE_MAC, mac)
    return frame.build(Packet(mac, frame.group_mac(group), source, group, frame.ICMP, body))


def advertisement(lifetime: int, options: Sequence[bytes]) -> bytes:
    """The ICMPv6 message. `lifetime`: seconds for which the sender is a default router; 0 if it is not one."""
    flags = _MANAGED | _OTHER
    head = struct.pack("!BBHBBHII", _ROUTER_ADVERTISEMENT, 0, 0, _HOP_LIMIT, flags, lifetime, 0, 0)
    return head + b"".join(options)


def in_packets(options: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Groups the options into advertisements that fit on every link (RFC 4861, 6.2.3); at least one group."""
    most = frame.LEAST_MTU - frame.HEADER - _HEAD
    part: list[bytes] = []
    for option in options:
        if part and sum(map(len, part)) + len(option) > most:
            yield part
            part = []
        part.append(option)
    yield part


def _option(kind: int, body: bytes) -> bytes:
    """An option, padded to a multiple of eight bytes."""
    words = (2 + len(body) + 7) // 8
    return bytes([kind, words]) + body.ljust(words * 8 - 2, b"\0")


def source_mac(mac: bytes) -> bytes:
    return _option(_SOURCE_MAC, mac)


def mtu(size: int) -> bytes:
    return _option(_MTU, struct.pack("!HI", 0, size))


def on_link(prefix: IPv6Network, seconds: int) -> bytes:
    """Says that the prefix is on this link. Guests must not make addresses from it, because only the plugin's are the pod's."""
    head = struct.pack("!BBIII", prefix.prefixlen, _ON_LINK, seconds, seconds, 0)
    return _option(_PREFIX, head + prefix.network_address.packed)


def route(to: IPv6Network, seconds: int) -> bytes:
    """A route through the sender (RFC 4191, 2.3), with as many bytes of the network as its length needs."""
    length = 0 if to.prefixlen == 0 else 8 if to.prefixlen <= 64 else 16
    return _option(_ROUTE, struct.pack("!BBI", to.prefixlen, 0, seconds) + to.network_address.packed[:length])


def dns(servers: Sequence[IPv6Address], seconds: int) -> bytes:
    """RFC 8106, 5.1."""
    body = b"".join(server.packed for server in servers[:_MOST_SERVERS])
    return _option(_DNS, struct.pack("!HI", 0, seconds) + body)


def search(domains: Sequence[str], seconds: int) -> bytes:
    """RFC 8106, 5.2: as many domains as fit into one option of one packet; b"" without domains."""
    room = frame.LEAST_MTU - frame.HEADER - _HEAD - 8
    body = b""
    for domain in domains:
        name = encode_search((domain,))
        body += name if len(body) + len(name) <= room else b""
    return _option(_SEARCH, struct.pack("!HI", 0, seconds) + body) if body else b""


def parse(data: bytes) -> Packet | None:
    """Like `frame.parse`, but None for other frames."""
    try:
        return frame.parse(data)
    except BadPacket:
        return None
