"""The DHCP guard as one nfnetlink batch: bytes only. Pure.

The rules, in nft's language:

    table bridge virtshim-dhcp {
      chain forward { type filter hook forward priority 0; policy accept;
        iifname "tap1" accept                                  # both ends of a NIC that has no address of ours to tell
        ether type ip ip protocol udp udp dport 67 drop        # requests stay on the tap
        ether type ip ip protocol udp udp sport 67 drop        # only our offers reach the guest
      }
    }

Why this and not the alternatives: the bridge family of nf_tables is in every distribution's kernel since 3.13, needs
no program (`nft`, `ebtables`) and no device in a rule; tc with an action needs act_gact, which small kernels leave out; the
netdev family needs a chain a device. Our own server talks on the tap directly, and is not forwarded. Numbers are from
linux/netfilter/nf_tables.h; the formats were compared with what `nft --debug=netlink` sends.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from tapmanager.links.netlink import ACK, REQUEST, attribute, message, nested

TABLE = "virtshim-dhcp"
_CHAIN = "forward"

_NFNL_MSG_BATCH_BEGIN = 0x10
_NFNL_MSG_BATCH_END = 0x11
_NFNL_SUBSYS_NFTABLES = 10
_NFPROTO_BRIDGE = 7
_NEWTABLE, _NEWCHAIN, _NEWRULE = 0, 3, 6
_CREATE, _APPEND = 0x400, 0x800

_REGISTER = 1
_PAYLOAD_LINK, _PAYLOAD_NETWORK, _PAYLOAD_TRANSPORT = 0, 1, 2
_ACCEPT, _DROP = 1, 0
_HOOK_FORWARD = 2
_IIFNAME = 6  # NFT_META_IIFNAME


def _u32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("!I", value))


def _text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def _message(kind: int, flags: int, sequence: int, family: int, resource: int, body: bytes) -> bytes:
    payload = struct.pack("!BBH", family, 0, resource) + body
    return message(kind, flags, sequence, payload)


def _expression(name: str, *inner: bytes) -> bytes:
    return nested(1, _text(1, name), nested(2, *inner))


def _match(base: int, offset: int, value: bytes) -> bytes:
    """Loads len(value) bytes at base + offset into a register and compares."""
    load = _expression("payload", _u32(1, _REGISTER), _u32(2, base), _u32(3, offset), _u32(4, len(value)))
    compare = _expression("cmp", _u32(1, _REGISTER), _u32(2, 0), nested(3, attribute(1, value)))
    return load + compare


def _from(interface: str) -> bytes:
    """Compares the name of the interface that the frame came in by; the kernel keeps it in 16 bytes."""
    load = _expression("meta", _u32(1, _REGISTER), _u32(2, _IIFNAME))
    name = interface.encode().ljust(16, b"\0")
    return load + _expression("cmp", _u32(1, _REGISTER), _u32(2, 0), nested(3, attribute(1, name)))


def _verdict(code: int) -> bytes:
    # Register 0 is the verdict; the kernel keeps it as a signed number.
    return _expression("immediate", _u32(1, 0), nested(2, nested(2, _u32(1, code))))


def _rule(sequence: int, expressions: bytes) -> bytes:
    body = _text(1, TABLE) + _text(2, _CHAIN) + nested(4, expressions)
    flags = REQUEST | _CREATE | _APPEND | ACK
    return _message(_NFNL_SUBSYS_NFTABLES << 8 | _NEWRULE, flags, sequence, _NFPROTO_BRIDGE, 0, body)


def _no_dhcp(port_offset: int) -> bytes:
    return (
        _match(_PAYLOAD_LINK, 12, b"\x08\x00")
        + _match(_PAYLOAD_NETWORK, 9, bytes([socket.IPPROTO_UDP]))
        + _match(_PAYLOAD_TRANSPORT, port_offset, struct.pack("!H", 67))
        + _verdict(_DROP)
    )


def dhcp_guard(unguarded: Sequence[str] = ()) -> tuple[bytes, int]:
    """The batch, and how many acknowledgements the kernel sends for it if all is well. `unguarded`: ports of bridges between
    which DHCP passes."""
    flags = REQUEST | _CREATE | ACK
    subsystem = _NFNL_SUBSYS_NFTABLES << 8
    table = _message(subsystem | _NEWTABLE, flags, 1, _NFPROTO_BRIDGE, 0, _text(1, TABLE))
    chain = (
        _text(1, TABLE)
        + _text(3, _CHAIN)
        + nested(4, _u32(1, _HOOK_FORWARD), _u32(2, 0))
        + _u32(5, _ACCEPT)
        + _text(7, "filter")
    )
    accepted = [_from(name) + _verdict(_ACCEPT) for name in unguarded]
    rules = [*accepted, _no_dhcp(2), _no_dhcp(0)]
    batch = (
        _message(_NFNL_MSG_BATCH_BEGIN, REQUEST, 0, socket.AF_UNSPEC, _NFNL_SUBSYS_NFTABLES, b"")
        + table
        + _message(subsystem | _NEWCHAIN, flags, 2, _NFPROTO_BRIDGE, 0, chain)
        + b"".join(_rule(number, rule) for number, rule in enumerate(rules, start=3))
        + _message(_NFNL_MSG_BATCH_END, REQUEST, 3 + len(rules), socket.AF_UNSPEC, _NFNL_SUBSYS_NFTABLES, b"")
    )
    return batch, 2 + len(rules)
