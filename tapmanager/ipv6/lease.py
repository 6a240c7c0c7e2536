"""Decides the answer, if any, to a guest's DHCPv6 message (RFC 8415 and 9915, section 18.3). Pure: takes request and lease,
returns the reply.

Each tap has one client and one set of addresses, so nothing is stored. The CNI plugin leased the addresses; this module only
tells the guest. The message's first IA_NA gets them.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Interface

from tapmanager.dhcp.packet import BadPacket, encode_search
from tapmanager.ipv6 import frame
from tapmanager.ipv6.frame import STAND_IN_SERVER, Packet, stand_in_address
from tapmanager.network_values import Dns, mac_bytes
from tapmanager.pod import Nic

# DHCPv6 messages as values and bytes: any bytes give a Message or BadPacket.

SOLICIT, ADVERTISE, REQUEST, CONFIRM, RENEW, REBIND, REPLY, RELEASE, DECLINE, RECONFIGURE = range(1, 11)
INFORMATION_REQUEST = 11

OPT_CLIENT_ID, OPT_SERVER_ID, OPT_IA_NA, OPT_IA_TA, OPT_IA_ADDRESS, OPT_ASKED, OPT_PREFERENCE, OPT_ELAPSED = range(1, 9)
OPT_STATUS, OPT_RAPID_COMMIT, OPT_DNS, OPT_SEARCH, OPT_IA_PD, OPT_REFRESH = 13, 14, 23, 24, 25, 32
STATUS_SUCCESS, _, STATUS_NO_ADDRESSES, STATUS_NO_BINDING, STATUS_NOT_ON_LINK, _, STATUS_NO_PREFIXES = range(7)

# Options that are used here, and that would be ambiguous if they occurred twice.
_SINGLE = frozenset({OPT_CLIENT_ID, OPT_SERVER_ID, OPT_ASKED, OPT_ELAPSED, OPT_RAPID_COMMIT})
HEADS = {OPT_IA_NA: 12, OPT_IA_TA: 4, OPT_IA_PD: 12}  # bytes before the options within
_ADDRESS = 24  # bytes of an address before the options within
_DUID = range(3, 131)  # RFC 8415, 11.1: two of its type, and 1 to 128
# Limits: one client with one address has few of these, and more would not fit into an answer.
_MOST_ASSOCIATIONS, _MOST_CLAIMED = 8, 16

Option = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Association:
    """An identity association of a client: its `kind` (IA_NA, IA_TA or IA_PD) and the addresses that the client claims, without
    prefixes of IA_PD."""

    kind: int
    iaid: bytes
    addresses: tuple[IPv6Address, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """`transaction`: three bytes. `options`: all options in order. Identity associations are parsed too."""

    kind: int
    transaction: bytes
    options: tuple[Option, ...] = ()
    associations: tuple[Association, ...] = ()

    def get(self, code: int) -> bytes | None:
        """The first option of that code."""
        return next((value for found, value in self.options if found == code), None)


def parse_message(data: bytes) -> Message:
    """Raises BadPacket, also for relayed messages, which have another form."""
    if len(data) < 4 or not SOLICIT <= data[0] <= INFORMATION_REQUEST:
        raise BadPacket("not a message between a DHCPv6 client and a server")
    options = tuple(parse_options(data[4:]))
    codes = [code for code, _ in options]
    if any(codes.count(code) > 1 for code in _SINGLE):
        raise BadPacket("an option occurs twice that may occur once")
    for code, value in options:
        if code in (OPT_CLIENT_ID, OPT_SERVER_ID) and len(value) not in _DUID:
            raise BadPacket("a bad DUID")
    associations = tuple(_association(code, value) for code, value in options if code in HEADS)
    addresses = sum(len(one.addresses) for one in associations)
    if len(associations) > _MOST_ASSOCIATIONS or addresses > _MOST_CLAIMED:
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
    inner = [found for code, found in parse_options(value[head:]) if code == OPT_IA_ADDRESS]
    if any(len(one) < _ADDRESS for one in inner):
        raise BadPacket("an address is cut short")
    return Association(kind, value[:4], tuple(IPv6Address(one[:16]) for one in inner))


def build_message(kind: int, transaction: bytes, options: Sequence[Option]) -> bytes:
    return bytes([kind]) + transaction + encode_options(options)


def encode_options(options: Sequence[Option]) -> bytes:
    return b"".join(struct.pack("!HH", code, len(value)) + value for code, value in options)


def address_option(address: IPv6Address, seconds: int) -> Option:
    """`seconds`: both preferred and valid lifetime; 0 withdraws the address."""
    return OPT_IA_ADDRESS, address.packed + struct.pack("!II", seconds, seconds)


def status_option(code: int) -> Option:
    return OPT_STATUS, struct.pack("!H", code)


def association_option(asked: Association, times: tuple[int, int], options: Sequence[Option]) -> Option:
    """`times`: T1 and T2, which IA_TA does not have."""
    head = asked.iaid if asked.kind == OPT_IA_TA else asked.iaid + struct.pack("!II", *times)
    return asked.kind, head + encode_options(options)


# As for DHCPv4: an address never changes while the guest lives, so a day keeps renewals rare.
_LEASE_SECONDS = 86400
_TIMES = _LEASE_SECONDS // 2, _LEASE_SECONDS * 7 // 8
# A UUID (RFC 6355), the same on each tap and node, because a guest may resume on another one.
SERVER_ID = b"\0\4" + uuid.UUID("a7c0a6a2-91f0-5f5b-9d3b-6b1ad1c2f0a4").bytes
# The highest preference: clients need not wait for other servers, because there are none.
_FIRST_CHOICE = OPT_PREFERENCE, b"\xff"
_MOST_ADDRESSES = 8
_ROOM = frame.LEAST_MTU - frame.HEADER - 8


@dataclass(frozen=True, slots=True)
class Lease:
    """What DHCPv6 tells one guest NIC. `server_mac`: only the source address of frames. `mac`: the guest's."""

    mac: bytes
    server_mac: bytes
    addresses: tuple[IPv6Address, ...]
    dns: tuple[IPv6Address, ...] = ()
    searches: tuple[str, ...] = ()


def lease_for(nic: Nic, dns: Dns) -> Lease | None:
    """None for a NIC without an IPv6 address."""
    found = tuple(IPv6Interface(address).ip for address in nic.addresses if ":" in address)
    if not found:
        return None
    return Lease(
        mac=mac_bytes(nic.mac),
        server_mac=mac_bytes(nic.bridge_mac),
        addresses=found[:_MOST_ADDRESSES],
        dns=tuple(IPv6Address(server) for server in dns.servers if ":" in server),
        searches=dns.searches,
    )


def answer(data: bytes, lease: Lease) -> bytes | None:
    """The Ethernet frame that answers `data`; None for no answer. Never raises because of the content of `data`."""
    try:
        packet = frame.parse(data)
        if not _is_to_us(packet, lease):
            return None
        port, body = frame.from_udp(packet.payload)
        request = parse_message(body)
    except BadPacket:
        return None
    reply = reply_to(request, lease) if port == frame.SERVER_PORT else None
    if reply is None:
        return None
    payload = frame.udp(frame.SERVER_PORT, frame.CLIENT_PORT, reply)
    server = stand_in_address(STAND_IN_SERVER)
    return frame.build(Packet(lease.server_mac, lease.mac, server, packet.source, frame.UDP, payload))


def _is_to_us(packet: Packet, lease: Lease) -> bool:
    """Whether a client on this link sent it: from its link-local address to the servers' group. Clients behind the guest get no
    answer."""
    is_here = packet.source_mac == lease.mac and packet.source.is_link_local
    return packet.protocol == frame.UDP and packet.target == frame.DHCP_SERVERS and is_here


def reply_to(request: Message, lease: Lease) -> bytes | None:
    """The reply; None for a message that must not be answered (section 16)."""
    by_kind: dict[int, Callable[[Message, Lease], bytes | None]] = {
        SOLICIT: _to_solicit,
        REQUEST: _to_request,
        CONFIRM: _to_confirm,
        RENEW: _to_renewal,
        REBIND: _to_renewal,
        RELEASE: _to_release,
        DECLINE: _to_release,
        INFORMATION_REQUEST: _to_information_request,
    }
    return by_kind[request.kind](request, lease) if request.kind in by_kind and _is_valid(request) else None


def _is_valid(request: Message) -> bool:
    server, client = request.get(OPT_SERVER_ID), request.get(OPT_CLIENT_ID)
    if request.kind == INFORMATION_REQUEST:
        return server in (None, SERVER_ID) and not request.associations
    names_server = request.kind in (REQUEST, RENEW, RELEASE, DECLINE)
    return client is not None and server == (SERVER_ID if names_server else None)


def _to_solicit(request: Message, lease: Lease) -> bytes:
    """Uses rapid commit if the client asks for it, because no other server would reserve an address in vain."""
    granted = [_granted(asked, request, lease) for asked in request.associations]
    if request.get(OPT_RAPID_COMMIT) is not None:
        return _reply(request, REPLY, [(OPT_RAPID_COMMIT, b""), *granted], _configuration(lease))
    return _reply(request, ADVERTISE, [_FIRST_CHOICE, *granted], _configuration(lease))


def _to_request(request: Message, lease: Lease) -> bytes:
    """A client that requests an address from an earlier lease is told that this is another link."""
    given = [
        _refused(asked, STATUS_NOT_ON_LINK)
        if set(asked.addresses) - set(lease.addresses)
        else _granted(asked, request, lease)
        for asked in request.associations
    ]
    return _reply(request, REPLY, given, _configuration(lease))


def _to_renewal(request: Message, lease: Lease) -> bytes:
    """Withdraws addresses that no longer belong to the client."""
    given = [_granted(asked, request, lease, stale=True) for asked in request.associations]
    return _reply(request, REPLY, given, _configuration(lease))


def _to_confirm(request: Message, lease: Lease) -> bytes | None:
    named = {address for asked in request.associations for address in asked.addresses}
    if not named:
        return None
    code = STATUS_SUCCESS if named <= set(lease.addresses) else STATUS_NOT_ON_LINK
    return _reply(request, REPLY, [status_option(code)])


def _to_release(request: Message, lease: Lease) -> bytes:
    """The address stays the pod's, even if the guest releases it."""
    unknown = [
        _refused(asked, STATUS_NO_BINDING)
        for asked in request.associations
        if not set(asked.addresses) & set(lease.addresses)
    ]
    return _reply(request, REPLY, [status_option(STATUS_SUCCESS), *unknown])


def _to_information_request(request: Message, lease: Lease) -> bytes:
    refresh = OPT_REFRESH, _LEASE_SECONDS.to_bytes(4, "big")
    return _reply(request, REPLY, [refresh], _configuration(lease))


def _granted(asked: Association, request: Message, lease: Lease, *, stale: bool = False) -> Option:
    """`stale`: also withdraw other addresses of the client."""
    first = next((one for one in request.associations if one.kind == OPT_IA_NA), None)
    gone = [one for one in asked.addresses if one not in lease.addresses] if stale else []
    options = [address_option(address, 0) for address in gone]
    if asked is first:
        options = [*(address_option(one, _LEASE_SECONDS) for one in lease.addresses), *options]
        return association_option(asked, _TIMES, options)
    none = STATUS_NO_PREFIXES if asked.kind == OPT_IA_PD else STATUS_NO_ADDRESSES
    return association_option(asked, (0, 0), [*options, status_option(none)])


def _refused(asked: Association, code: int) -> Option:
    return association_option(asked, (0, 0), [status_option(code)])


def _configuration(lease: Lease) -> Sequence[Option]:
    """The options, the most important first."""
    found = [(OPT_DNS, b"".join(server.packed for server in lease.dns))] if lease.dns else []
    return [*found, *((OPT_SEARCH, name) for domain in lease.searches if (name := encode_search((domain,))))]


def _reply(request: Message, kind: int, must: Sequence[Option], may: Sequence[Option] = ()) -> bytes:
    """`must`, and those of `may` that fit into a packet that every link carries. Domains become one option."""
    client = request.get(OPT_CLIENT_ID)
    head = [] if client is None else [(OPT_CLIENT_ID, client)]
    options = [*head, (OPT_SERVER_ID, SERVER_ID), *must]
    room = _ROOM - 4 - len(encode_options(options)) - 4
    search = b""
    for code, value in may:
        if code == OPT_SEARCH and len(value) <= room:
            search += value
            room -= len(value)
        elif code != OPT_SEARCH and len(value) + 4 <= room:
            options.append((code, value))
            room -= len(value) + 4
    return build_message(kind, request.transaction, [*options, (OPT_SEARCH, search)] if search else options)
