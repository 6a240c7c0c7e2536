"""Which answer, if any, a guest's DHCPv6 message gets (RFC 8415 and 9915, section 18.3). Pure: request and lease in, reply out.

There is one client and one set of addresses a tap, so nothing is stored: the CNI plugin leased them, this only tells the guest.
They are those of the message's first IA_NA.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Interface

from tapmanager.dhcp.packet import BadPacket, encode_search
from tapmanager.ipv6 import frame, message, stand_in
from tapmanager.ipv6.frame import Packet
from tapmanager.ipv6.message import Association, Message, Option
from tapmanager.pod import Dns, Nic

# As for DHCPv4: an address never changes while the guest lives; a day keeps renewals rare.
_LEASE_SECONDS = 86400
_TIMES = _LEASE_SECONDS // 2, _LEASE_SECONDS * 7 // 8
# A UUID (RFC 6355), the same on each tap and each node: a guest may wake up on another.
SERVER_ID = b"\0\4" + uuid.UUID("a7c0a6a2-91f0-5f5b-9d3b-6b1ad1c2f0a4").bytes
# There is no other server to wait for.
_FIRST_CHOICE = message.PREFERENCE, b"\xff"
_MOST_ADDRESSES = 8
_ROOM = frame.LEAST_MTU - frame.HEADER - 8


@dataclass(frozen=True, slots=True)
class Lease:
    """What one guest NIC is told by DHCPv6. `server_mac` is only a source address of frames, `mac` the guest's."""

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
        mac=bytes.fromhex(nic.mac.replace(":", "")),
        server_mac=bytes.fromhex(nic.bridge_mac.replace(":", "")),
        addresses=found[:_MOST_ADDRESSES],
        dns=tuple(IPv6Address(server) for server in dns.servers if ":" in server),
        searches=dns.searches,
    )


def answer(data: bytes, lease: Lease) -> bytes | None:
    """The Ethernet frame to send for the one that came, None to stay silent. Never raises for what is in `data`."""
    try:
        packet = frame.parse(data)
        if not _is_to_us(packet, lease):
            return None
        port, body = frame.from_udp(packet.payload)
        request = message.parse(body)
    except BadPacket:
        return None
    reply = reply_to(request, lease) if port == frame.SERVER_PORT else None
    if reply is None:
        return None
    payload = frame.udp(frame.SERVER_PORT, frame.CLIENT_PORT, reply)
    server = stand_in.address(stand_in.SERVER)
    return frame.build(Packet(lease.server_mac, lease.mac, server, packet.source, frame.UDP, payload))


def _is_to_us(packet: Packet, lease: Lease) -> bool:
    """A client on this link speaks to the servers' group, from its link-local address; one behind the guest is not ours."""
    is_here = packet.source_mac == lease.mac and packet.source.is_link_local
    return packet.protocol == frame.UDP and packet.target == frame.DHCP_SERVERS and is_here


def reply_to(request: Message, lease: Lease) -> bytes | None:
    """None for what is not ours to answer (section 16)."""
    by_kind: dict[int, Callable[[Message, Lease], bytes | None]] = {
        message.SOLICIT: _to_solicit,
        message.REQUEST: _to_request,
        message.CONFIRM: _to_confirm,
        message.RENEW: _to_renewal,
        message.REBIND: _to_renewal,
        message.RELEASE: _to_release,
        message.DECLINE: _to_release,
        message.INFORMATION_REQUEST: _to_information_request,
    }
    return by_kind[request.kind](request, lease) if request.kind in by_kind and _is_valid(request) else None


def _is_valid(request: Message) -> bool:
    server, client = request.get(message.SERVER_ID), request.get(message.CLIENT_ID)
    if request.kind == message.INFORMATION_REQUEST:
        return server in (None, SERVER_ID) and not request.associations
    names_server = request.kind in (message.REQUEST, message.RENEW, message.RELEASE, message.DECLINE)
    return client is not None and server == (SERVER_ID if names_server else None)


def _to_solicit(request: Message, lease: Lease) -> bytes:
    """Rapid commit where the client asks for it: there is no other server whose address would be kept for nothing."""
    granted = [_granted(asked, request, lease) for asked in request.associations]
    if request.get(message.RAPID_COMMIT) is not None:
        return _reply(request, message.REPLY, [(message.RAPID_COMMIT, b""), *granted], _configuration(lease))
    return _reply(request, message.ADVERTISE, [_FIRST_CHOICE, *granted], _configuration(lease))


def _to_request(request: Message, lease: Lease) -> bytes:
    """A client that wants another address, from an earlier life, is told that this is another link."""
    given = [
        _refused(asked, message.NOT_ON_LINK)
        if set(asked.addresses) - set(lease.addresses)
        else _granted(asked, request, lease)
        for asked in request.associations
    ]
    return _reply(request, message.REPLY, given, _configuration(lease))


def _to_renewal(request: Message, lease: Lease) -> bytes:
    """What it has and is not its own any more is called back."""
    given = [_granted(asked, request, lease, stale=True) for asked in request.associations]
    return _reply(request, message.REPLY, given, _configuration(lease))


def _to_confirm(request: Message, lease: Lease) -> bytes | None:
    named = {address for asked in request.associations for address in asked.addresses}
    if not named:
        return None
    code = message.SUCCESS if named <= set(lease.addresses) else message.NOT_ON_LINK
    return _reply(request, message.REPLY, [message.status(code)])


def _to_release(request: Message, lease: Lease) -> bytes:
    """The address stays the pod's whatever the guest says."""
    unknown = [
        _refused(asked, message.NO_BINDING)
        for asked in request.associations
        if not set(asked.addresses) & set(lease.addresses)
    ]
    return _reply(request, message.REPLY, [message.status(message.SUCCESS), *unknown])


def _to_information_request(request: Message, lease: Lease) -> bytes:
    refresh = message.REFRESH, _LEASE_SECONDS.to_bytes(4, "big")
    return _reply(request, message.REPLY, [refresh], _configuration(lease))


def _granted(asked: Association, request: Message, lease: Lease, *, stale: bool = False) -> Option:
    """`stale`: with what the client has besides, for no longer."""
    first = next((one for one in request.associations if one.kind == message.IA_NA), None)
    gone = [one for one in asked.addresses if one not in lease.addresses] if stale else []
    options = [message.address_option(address, 0) for address in gone]
    if asked is first:
        options = [*(message.address_option(one, _LEASE_SECONDS) for one in lease.addresses), *options]
        return message.association_option(asked, _TIMES, options)
    none = message.NO_PREFIXES if asked.kind == message.IA_PD else message.NO_ADDRESSES
    return message.association_option(asked, (0, 0), [*options, message.status(none)])


def _refused(asked: Association, code: int) -> Option:
    return message.association_option(asked, (0, 0), [message.status(code)])


def _configuration(lease: Lease) -> Sequence[Option]:
    """The most needed first."""
    found = [(message.DNS, b"".join(server.packed for server in lease.dns))] if lease.dns else []
    return [*found, *((message.SEARCH, name) for domain in lease.searches if (name := encode_search((domain,))))]


def _reply(request: Message, kind: int, must: Sequence[Option], may: Sequence[Option] = ()) -> bytes:
    """`must`, and of `may` what fits into a packet that every link carries; domains become one option."""
    client = request.get(message.CLIENT_ID)
    head = [] if client is None else [(message.CLIENT_ID, client)]
    options = [*head, (message.SERVER_ID, SERVER_ID), *must]
    room = _ROOM - 4 - len(message.encode(options)) - 4
    search = b""
    for code, value in may:
        if code == message.SEARCH and len(value) <= room:
            search += value
            room -= len(value)
        elif code != message.SEARCH and len(value) + 4 <= room:
            options.append((code, value))
            room -= len(value) + 4
    return message.build(kind, request.transaction, [*options, (message.SEARCH, search)] if search else options)
