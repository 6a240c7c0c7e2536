"""The routers that are announced to a guest, and the advertisements of each. Pure.

The next hop of every route in a router advertisement is its sender. So each gateway of the NIC's routes gets its own router.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Interface, IPv6Network

from tapmanager.ipv6 import discovery, frame
from tapmanager.ipv6.frame import (
    STAND_IN_MOST,
    STAND_IN_SERVER,
    Packet,
    stand_in_address,
    stand_in_mac,
    stand_in_number_of,
)
from tapmanager.network_values import Dns, mac_bytes
from tapmanager.pod import Nic

# The maximum of the field (RFC 8319), because nothing repeats the advertisements while tapmanager is down.
_SECONDS = 65535
_EVERYWHERE = IPv6Network("::/0")


@dataclass(frozen=True, slots=True)
class Router:
    """`address`: the source of the advertisements. `gateway`: the plugin's gateway, if `address` is a stand-in for it. `mac`: the
    gateway's, if the plugin reported it. `routes`: in addition to the default route, if `is_default`."""

    address: IPv6Address
    gateway: IPv6Address | None
    mac: bytes | None
    is_default: bool
    routes: tuple[IPv6Network, ...]


@dataclass(frozen=True, slots=True)
class Announcement:
    """What is announced to one guest NIC. `own`: one of its addresses. `on_link`: networks without a gateway. `left_out`:
    routes that cannot be advertised, with the reason."""

    mac: bytes
    server_mac: bytes
    own: IPv6Address
    mtu: int
    routers: tuple[Router, ...] = ()
    on_link: tuple[IPv6Network, ...] = ()
    dns: tuple[IPv6Address, ...] = ()
    searches: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def looks_for_gateways(self) -> bool:
        """Whether the MAC of a gateway is unknown."""
        return any(router.gateway is not None and router.mac is None for router in self.routers)


def announcement_for(nic: Nic, dns: Dns) -> Announcement | None:
    """None for a NIC without an IPv6 address."""
    own = [IPv6Interface(address) for address in nic.addresses if ":" in address]
    if not own:
        return None
    by_gateway: dict[IPv6Address, list[IPv6Network]] = {}
    on_link = {one.network for one in own if one.network.prefixlen < one.max_prefixlen}
    left_out: list[str] = []
    for route in nic.routes:
        if ":" not in route.destination:
            continue
        to = IPv6Network(route.destination)
        if route.gateway:
            by_gateway.setdefault(IPv6Address(route.gateway), []).append(to)
        elif to == _EVERYWHERE:
            left_out.append(f"{to}: it has no gateway")
        elif not to.is_link_local:
            on_link.add(to)
    routers = []
    for number, (gateway, networks) in enumerate(by_gateway.items(), start=1):
        if number > STAND_IN_MOST and not gateway.is_link_local:
            left_out += [f"{to}: too many gateways" for to in networks]
        else:
            routers.append(_router(gateway, number, networks, nic))
    return Announcement(
        mac=mac_bytes(nic.mac),
        server_mac=mac_bytes(nic.bridge_mac),
        own=own[0].ip,
        mtu=nic.guest_mtu,
        routers=tuple(routers),
        on_link=tuple(sorted(on_link)),
        dns=tuple(IPv6Address(server) for server in dns.servers if ":" in server),
        searches=dns.searches,
        left_out=tuple(left_out),
    )


def _router(gateway: IPv6Address, number: int, networks: Sequence[IPv6Network], nic: Nic) -> Router:
    macs = {ipaddress.ip_address(one.address): mac_bytes(one.mac) for one in nic.neighbours}
    return Router(
        address=gateway if gateway.is_link_local else stand_in_address(number),
        gateway=None if gateway.is_link_local else gateway,
        mac=macs.get(gateway),
        is_default=_EVERYWHERE in networks,
        routes=tuple(network for network in networks if network != _EVERYWHERE),
    )


def _mac_of(router: Router) -> bytes | None:
    """The router's MAC for the guest; None for a router that is not a stand-in, which the guest can ask itself."""
    return router.mac if router.gateway is None else stand_in_mac(stand_in_number_of(router.address))


def frames(announced: Announcement, router: Router | None, target: IPv6Address, target_mac: bytes) -> list[bytes]:
    """The advertisements of one router; without a router, those of the remaining information."""
    source = stand_in_address(STAND_IN_SERVER) if router is None else router.address
    lifetime = _SECONDS if router is not None and router.is_default else 0
    options = [
        *([discovery.source_mac(mac)] if router is not None and (mac := _mac_of(router)) else []),
        *([discovery.mtu(announced.mtu)] if announced.mtu >= frame.LEAST_MTU else []),
        *(discovery.on_link(prefix, _SECONDS) for prefix in announced.on_link),
        *([discovery.dns(announced.dns, _SECONDS)] if announced.dns else []),
        *(discovery.route(to, _SECONDS) for to in (() if router is None else router.routes)),
        discovery.search(announced.searches, _SECONDS),
    ]
    messages = [discovery.advertisement(lifetime, part) for part in discovery.in_packets(list(filter(None, options)))]
    return [
        frame.build(Packet(announced.server_mac, target_mac, source, target, frame.ICMP, message))
        for message in messages
    ]
