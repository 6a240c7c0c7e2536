"""DHCPv6 messages (RFC 8415, RFC 9915) as values and bytes. Pure: any bytes give a Message or BadPacket."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address

from tapmanager.dhcp.packet import BadPacket

SOLICIT, ADVERTISE, REQUEST, CONFIRM, RENEW, REBIND, REPLY, RELEASE, DECLINE, RECONFIGURE = range(1, 11)
INFORMATION_REQUEST = 11

CLIENT_ID, SERVER_ID, IA_NA, IA_TA, IA_ADDRESS, ASKED, PREFERENCE, ELAPSED = range(1, 9)
STATUS, RAPID_COMMIT, DNS, SEARCH, IA_PD, REFRESH = 13, 14, 23, 24, 25, 32
SUCCESS, _, NO_ADDRESSES, NO_BINDING, NOT_ON_LINK, _, NO_PREFIXES = range(7)

# Those that are read here, and can mean two things if they come twice.
_SINGLE = frozenset({CLIENT_ID, SERVER_ID, ASKED, ELAPSED, RAPID_COMMIT})
HEADS = {IA_NA: 12, IA_TA: 4, IA_PD: 12}  # bytes before the options within
_ADDRESS = 24  # bytes of one before the options within
_DUID = range(3, 131)  # RFC 8415, 11.1: two of its type, and 1 to 128
# Of one client with one address all of these are few; more would not fit into an answer either.
_MOST_ASSOCIATIONS, _MOST_ADDRESSES = 8, 16

Option = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Association:
    """An identity association of a client: `kind` is IA_NA, IA_TA or IA_PD; what it says it has (none of IA_PD's prefixes)."""

    kind: int
    iaid: bytes
    addresses: tuple[IPv6Address, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """`transaction`: three bytes. `options` has all, in order; identity associations are read too."""

    kind: int
    transaction: bytes
    options: tuple[Option, ...] = ()
    associations: tuple[Association, ...] = ()

    def get(self, code: int) -> bytes | None:
        """The first option of that code."""
        return next((value for found, value in self.options if found == code), None)


def parse(data: bytes) -> Message:
    """Raises BadPacket, for relayed messages (which are of another form) too."""
    if len(data) < 4 or not SOLICIT <= data[0] <= INFORMATION_REQUEST:
        raise BadPacket("not a message between a DHCPv6 client and a server")
    options = tuple(parse_options(data[4:]))
    codes = [code for code, _ in options]
    if any(codes.count(code) > 1 for code in _SINGLE):
        raise BadPacket("an option twice that can be there once")
    for code, value in options:
        if code in (CLIENT_ID, SERVER_ID) and len(value) not in _DUID:
            raise BadPacket("a bad DUID")
    associations = tuple(_association(code, value) for code, value in options if code in HEADS)
    addresses = sum(len(one.addresses) for one in associations)
    if len(associations) > _MOST_ASSOCIATIONS or addresses > _MOST_ADDRESSES:
        raise BadPacket("too many addresses for one client")
    return Message(data[0], data[1:4], options, associations)


def parse_options(area: bytes) -> Iterator[Option]:
    at = 0
    while at < len(area):
        if at + 4 > len(area):
            raise BadPacket("an option's head is cut short")
        code, length = struct.unpack_from("!HH", area, at)
        if at + 4 + length > len(area):
            raise BadPacket(f"option {code} is cut short")
        yield code, area[at + 4 : at + 4 + length]
        at += 4 + length


def _association(kind: int, value: bytes) -> Association:
    head = HEADS[kind]
    if len(value) < head:
        raise BadPacket("an identity association is cut short")
    inner = [found for code, found in parse_options(value[head:]) if code == IA_ADDRESS]
    if any(len(one) < _ADDRESS for one in inner):
        raise BadPacket("an address is cut short")
    return Association(kind, value[:4], tuple(IPv6Address(one[:16]) for one in inner))


def build(kind: int, transaction: bytes, options: Sequence[Option]) -> bytes:
    return bytes([kind]) + transaction + encode(options)


def encode(options: Sequence[Option]) -> bytes:
    return b"".join(struct.pack("!HH", code, len(value)) + value for code, value in options)


def address_option(address: IPv6Address, seconds: int) -> Option:
    """Preferred and valid for as long; 0: not any more."""
    return IA_ADDRESS, address.packed + struct.pack("!II", seconds, seconds)


def status(code: int, words: str = "") -> Option:
    return STATUS, struct.pack("!H", code) + words.encode("ascii")


def association_option(asked: Association, times: tuple[int, int], options: Sequence[Option]) -> Option:
    """`times`: T1 and T2, which IA_TA has none of."""
    head = asked.iaid if asked.kind == IA_TA else asked.iaid + struct.pack("!II", *times)
    return asked.kind, head + encode(options)
