"""nf_tables messages for filters of the bridge family: expressions, rules and one batch, as bytes. Pure.

The bridge family is in every distribution's kernel since 3.13, needs no program (`nft`, `ebtables`) and no device in a rule; tc
with an action needs act_gact, which small kernels leave out; the netdev family needs a chain per device. Numbers are from
linux/netfilter/nf_tables.h; the formats were compared with what `nft --debug=netlink` sends."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tapmanager.links.netlink import ACK, REQUEST, attribute, message, nested

_NFNL_MSG_BATCH_BEGIN = 0x10
_NFNL_MSG_BATCH_END = 0x11
_NFNL_SUBSYS_NFTABLES = 10
_NFPROTO_BRIDGE = 7
_NEWTABLE, _NEWCHAIN, _NEWRULE, _DELRULE = 0, 3, 6, 8
_CREATE, _APPEND = 0x400, 0x800

# Where a payload's offset counts from.
LINK, NETWORK, TRANSPORT = 0, 1, 2
ACCEPT, DROP = 1, 0
PREROUTING, FORWARD = 0, 2  # hooks
_IIFNAME, _L4PROTO = 6, 16  # NFT_META_*
_EQUAL, _OTHER = 0, 1  # NFT_CMP_*
_FIRST, _SECOND = 1, 2  # registers of 16 bytes; 0 is the verdict


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain with its own table, hook and priority. Lower priorities come first."""

    table: str
    name: str
    hook: int
    priority: int = 0


def _u32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("!I", value))


def _text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def _message(kind: int, flags: int, sequence: int, family: int, resource: int, body: bytes) -> bytes:
    payload = struct.pack("!BBH", family, 0, resource) + body
    return message(kind, flags, sequence, payload)


def _expression(name: str, *inner: bytes) -> bytes:
    return nested(1, _text(1, name), nested(2, *inner))


def _compare(how: int, value: bytes, register: int = _FIRST) -> bytes:
    return _expression("cmp", _u32(1, register), _u32(2, how), nested(3, attribute(1, value)))


def _payload(base: int, offset: int, length: int) -> bytes:
    return _expression("payload", _u32(1, _FIRST), _u32(2, base), _u32(3, offset), _u32(4, length))


def is_at(base: int, offset: int, value: bytes) -> bytes:
    """Matches if these bytes are at the offset."""
    return _payload(base, offset, len(value)) + _compare(_EQUAL, value)


def is_none_of(base: int, offset: int, values: Sequence[bytes], mask: bytes = b"", masked: bytes = b"") -> bytes:
    """Matches if none of the values, which have equal lengths, is at the offset, and the bytes under `mask` are not `masked`."""
    found = _payload(base, offset, len(values[0])) + b"".join(_compare(_OTHER, value) for value in values)
    return found + _masked(mask) + _compare(_OTHER, masked, _SECOND) if mask else found


def has_bits(base: int, offset: int, bits: bytes) -> bytes:
    """Matches if one of these bits is set."""
    return _payload(base, offset, len(bits)) + _masked(bits) + _compare(_OTHER, bytes(len(bits)), _SECOND)


def _masked(mask: bytes) -> bytes:
    laid_over = nested(4, attribute(1, mask)), nested(5, attribute(1, bytes(len(mask))))
    return _expression("bitwise", _u32(1, _FIRST), _u32(2, _SECOND), _u32(3, len(mask)), *laid_over)


def came_by(interface: str) -> bytes:
    """Matches if the frame arrived on that interface. The kernel stores names in 16 bytes."""
    load = _expression("meta", _u32(1, _FIRST), _u32(2, _IIFNAME))
    return load + _compare(_EQUAL, interface.encode().ljust(16, b"\0"))


def has_protocol(number: int) -> bytes:
    """Matches the packet's protocol, also behind IPv6's extension headers."""
    return _expression("meta", _u32(1, _FIRST), _u32(2, _L4PROTO)) + _compare(_EQUAL, bytes([number]))


def lacks_protocol(number: int) -> bytes:
    return _expression("meta", _u32(1, _FIRST), _u32(2, _L4PROTO)) + _compare(_OTHER, bytes([number]))


def put_at(base: int, offset: int, value: bytes) -> bytes:
    """Writes these bytes at the offset, in headers without a checksum."""
    load = _expression("immediate", _u32(1, _FIRST), nested(2, attribute(1, value)))
    return load + _expression("payload", _u32(5, _FIRST), _u32(2, base), _u32(3, offset), _u32(4, len(value)))


def verdict(code: int) -> bytes:
    # Register 0 holds the verdict as a signed number.
    return _expression("immediate", _u32(1, 0), nested(2, nested(2, _u32(1, code))))


def table_of(chain: Chain) -> tuple[bytes, bytes]:
    """Messages that make the table and the chain, unless they exist."""
    body = (
        _text(1, chain.table)
        + _text(3, chain.name)
        + nested(4, _u32(1, chain.hook), attribute(2, struct.pack("!i", chain.priority)))
        + _u32(5, ACCEPT)
        + _text(7, "filter")
    )
    return _new(_NEWTABLE, _text(1, chain.table)), _new(_NEWCHAIN, body)


def emptied(chain: Chain) -> bytes:
    """A message that removes all rules of the chain, which must exist."""
    body = _text(1, chain.table) + _text(2, chain.name)
    return _message(_NFNL_SUBSYS_NFTABLES << 8 | _DELRULE, REQUEST | ACK, 0, _NFPROTO_BRIDGE, 0, body)


def rule(chain: Chain, expressions: bytes, *, first: bool = False) -> bytes:
    """A message that adds a rule at the end of the chain, or at its beginning."""
    body = _text(1, chain.table) + _text(2, chain.name) + nested(4, expressions)
    return _new(_NEWRULE, body, 0 if first else _APPEND)


def _new(kind: int, body: bytes, more: int = 0) -> bytes:
    flags = REQUEST | _CREATE | ACK | more
    return _message(_NFNL_SUBSYS_NFTABLES << 8 | kind, flags, 0, _NFPROTO_BRIDGE, 0, body)


def batch(messages: Sequence[bytes]) -> tuple[bytes, int]:
    """The bytes of an atomic batch, and the number of acknowledgements on success."""
    begin = _message(_NFNL_MSG_BATCH_BEGIN, REQUEST, 0, socket.AF_UNSPEC, _NFNL_SUBSYS_NFTABLES, b"")
    end = _message(_NFNL_MSG_BATCH_END, REQUEST, 0, socket.AF_UNSPEC, _NFNL_SUBSYS_NFTABLES, b"")
    return begin + b"".join(messages) + end, len(messages)
