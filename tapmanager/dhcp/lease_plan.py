"""Decides the answer, if any, to a guest's DHCP message. Pure: takes request and lease, returns the reply.

Each tap has one client and one address, so nothing is stored. The CNI plugin leased the address; this module only tells the
guest.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address

from tapmanager.dhcp import packet
from tapmanager.dhcp.packet import (
    BROADCAST_IP,
    BROADCAST_MAC,
    CLIENT_PORT,
    SERVER_PORT,
    Datagram,
    Message,
    build_frame,
    parse_frame,
)
from tapmanager.network_values import Dns, mac_bytes
from tapmanager.pod import Nic, Route

# A guest's address never changes while it lives; a day keeps renewals rare.
_LEASE_SECONDS = 86400
_T1_SECONDS = _LEASE_SECONDS // 2
_T2_SECONDS = _LEASE_SECONDS * 7 // 8  # RFC 2131, 4.4.5
# The server's address if no gateway can lend its own. Renewals to it also cross the tap, where they are answered.
_LINK_LOCAL_SERVER = IPv4Address("169.254.169.67")
# RFC 2131, 2: a client that names no size (option 57) must accept an IP datagram of 576 bytes.
_DEFAULT_SIZE = 576
_IP_UDP = 28
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Lease:
    """What DHCP tells one guest NIC. `server_mac`: only the source address of frames. `mac`: the guest's."""

    mac: bytes
    server_mac: bytes
    server: IPv4Address
    interface: ipaddress.IPv4Interface
    mtu: int
    routes: tuple[tuple[ipaddress.IPv4Network, IPv4Address], ...] = ()
    dns: tuple[IPv4Address, ...] = ()
    searches: tuple[str, ...] = ()
    hostname: str = ""


def lease_for(nic: Nic, dns: Dns, name: str) -> Lease | None:
    """The lease of the NIC's first IPv4 address; None without one. `name`: the pod's hostname, or its name."""
    found = [ipaddress.IPv4Interface(address) for address in nic.addresses if ":" not in address]
    if not found:
        return None
    routes = tuple(
        _route(route) for route in nic.routes if ":" not in route.destination and ":" not in (route.gateway or "")
    )
    gateways = [router for _, router in routes if router != packet.ANY]
    default = [router for to, router in routes if to.prefixlen == 0 and router != packet.ANY]
    return Lease(
        mac=mac_bytes(nic.mac),
        server_mac=mac_bytes(nic.bridge_mac),
        server=(*default, *gateways, _LINK_LOCAL_SERVER)[0],
        interface=found[0],
        mtu=nic.guest_mtu,
        routes=routes,
        dns=tuple(IPv4Address(server) for server in dns.servers if ":" not in server),
        searches=dns.searches,
        hostname=hostname_of(name),
    )


def _route(route: Route) -> tuple[ipaddress.IPv4Network, IPv4Address]:
    return ipaddress.IPv4Network(route.destination), IPv4Address(route.gateway) if route.gateway else packet.ANY


def hostname_of(name: str) -> str:
    """Derives the hostname from a pod's name in the same way as kubelet: 63 characters, no dot or hyphen at the end; "" if
    nothing is left."""
    name = name[:63].rstrip("-.")
    return name if name and all(_LABEL.fullmatch(label) for label in name.split(".")) else ""


def answer(data: bytes, lease: Lease) -> bytes | None:
    """The Ethernet frame that answers `data`; None for no answer. Never raises because of the content of `data`."""
    try:
        datagram = parse_frame(data)
        if datagram.target_port != SERVER_PORT:
            return None
        request = packet.parse(datagram.payload)
    except packet.BadPacket:
        return None
    reply = reply_to(request, lease)
    return None if reply is None else _framed(request, reply, lease)


def reply_to(request: Message, lease: Lease) -> Message | None:
    """The reply; None for a message of another client, a relayed one, or one that chooses another server."""
    if request.op != packet.BOOTREQUEST or request.chaddr != lease.mac or request.giaddr != packet.ANY:
        return None
    if request.kind == packet.DISCOVER:
        return _grant(request, lease, packet.OFFER)
    if request.kind == packet.REQUEST:
        return _to_request(request, lease)
    if request.kind == packet.INFORM and request.ciaddr != packet.ANY:
        return _inform(request, lease)
    return None  # DECLINE and RELEASE have no answer (RFC 2131, 4.3.3 and 4.3.4)


def _to_request(request: Message, lease: Lease) -> Message | None:
    """RFC 2131, 4.3.2: SELECTING names the server, INIT-REBOOT only the address; RENEWING and REBINDING use the address."""
    server = request.address(packet.OPT_SERVER_ID)
    if server is not None and server != lease.server:
        return None
    wanted = request.address(packet.OPT_REQUESTED_IP) or request.ciaddr
    if wanted == packet.ANY:
        return None
    if wanted != lease.interface.ip:
        return _refuse(request, lease, wanted)
    return _grant(request, lease, packet.ACK)


def _refuse(request: Message, lease: Lease, wanted: IPv4Address) -> Message:
    words = f"{wanted} is not this machine's address, {lease.interface.ip} is"
    options = {
        packet.OPT_TYPE: bytes([packet.NAK]),
        packet.OPT_SERVER_ID: lease.server.packed,
        packet.OPT_MESSAGE: words.encode("ascii"),
        **_echo(request),
    }
    return Message(
        packet.BOOTREPLY, request.xid, request.chaddr, request.flags | packet.BROADCAST_FLAG, options=options
    )


def _grant(request: Message, lease: Lease, kind: int) -> Message:
    times = {
        packet.OPT_LEASE_TIME: _LEASE_SECONDS.to_bytes(4, "big"),
        packet.OPT_T1: _T1_SECONDS.to_bytes(4, "big"),
        packet.OPT_T2: _T2_SECONDS.to_bytes(4, "big"),
    }
    return Message(
        packet.BOOTREPLY,
        request.xid,
        request.chaddr,
        request.flags,
        ciaddr=request.ciaddr if kind == packet.ACK else packet.ANY,
        yiaddr=lease.interface.ip,
        options=_fitting(request, {**_head(request, lease, kind), **times}, _configuration(lease)),
    )


def _inform(request: Message, lease: Lease) -> Message:
    """Configuration only: no yiaddr, no lease times (RFC 2131, 4.3.5)."""
    options = _fitting(request, _head(request, lease, packet.ACK), _configuration(lease))
    return Message(packet.BOOTREPLY, request.xid, request.chaddr, request.flags, ciaddr=request.ciaddr, options=options)


def _head(request: Message, lease: Lease, kind: int) -> dict[int, bytes]:
    return {packet.OPT_TYPE: bytes([kind]), packet.OPT_SERVER_ID: lease.server.packed, **_echo(request)}


def _echo(request: Message) -> dict[int, bytes]:
    """RFC 6842: a client identifier comes back as it was sent."""
    value = request.options.get(packet.OPT_CLIENT_ID)
    return {} if value is None else {packet.OPT_CLIENT_ID: value}


def _configuration(lease: Lease) -> dict[int, bytes]:
    """The options, the most important first."""
    options = {packet.OPT_MASK: lease.interface.netmask.packed, packet.OPT_MTU: lease.mtu.to_bytes(2, "big")}
    default = [router for to, router in lease.routes if to.prefixlen == 0 and router != packet.ANY]
    if default:
        # RFC 3442: a client that supports option 121 ignores option 3, so the default route is in both.
        options[packet.OPT_ROUTER] = default[0].packed
    if lease.routes:
        options[packet.OPT_CLASSLESS_ROUTES] = packet.encode_routes(list(lease.routes))
    if lease.dns:
        options[packet.OPT_DNS] = b"".join(server.packed for server in lease.dns)
    if lease.interface.network.prefixlen < 31:
        options[packet.OPT_BROADCAST] = lease.interface.network.broadcast_address.packed
    if lease.hostname:
        options[packet.OPT_HOSTNAME] = lease.hostname.encode("ascii")
    search = packet.encode_search(lease.searches)
    if search:
        # Clients without support of option 119 (busybox) use option 15 as search list.
        first = next(domain for domain in lease.searches if packet.encode_search((domain,)))
        options[packet.OPT_DOMAIN] = first.rstrip(".").encode("ascii")
        options[packet.OPT_SEARCH] = search
    return options


def _fitting(request: Message, must: Mapping[int, bytes], may: Mapping[int, bytes]) -> dict[int, bytes]:
    """`must`, then those of `may` that fit into the client's size limit: first the requested ones, then the others."""
    limit = request.options.get(packet.OPT_MAX_SIZE, b"")
    size = max(int.from_bytes(limit, "big"), _DEFAULT_SIZE) if len(limit) == 2 else _DEFAULT_SIZE
    room = min(size, 1500) - _IP_UDP - 240 - 1
    options = dict(must)
    room -= sum(len(packet.encode_option(code, value)) for code, value in must.items())
    asked = request.options.get(packet.OPT_PARAMETERS, b"")
    for code, value in sorted(may.items(), key=lambda item: item[0] not in asked):
        length = len(packet.encode_option(code, value))
        if length <= room:
            options[code] = value
            room -= length
    return options


def _framed(request: Message, reply: Message, lease: Lease) -> bytes:
    """RFC 2131, 4.1: to ciaddr if the client has it; else broadcast if asked for, or for a NAK; else to the new address."""
    mac, ip = request.chaddr, reply.yiaddr
    if reply.kind == packet.NAK:
        mac, ip = BROADCAST_MAC, BROADCAST_IP
    elif request.ciaddr != packet.ANY:
        ip = request.ciaddr
    elif request.flags & packet.BROADCAST_FLAG:
        mac, ip = BROADCAST_MAC, BROADCAST_IP
    datagram = Datagram(lease.server_mac, mac, lease.server, ip, SERVER_PORT, CLIENT_PORT, packet.build(reply))
    return build_frame(datagram)
