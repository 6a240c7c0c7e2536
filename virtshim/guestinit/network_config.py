"""cloud-init network configuration, version 2, for the NICs of a pod. No I/O."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Any

from virtshim.domain.network import Dns, Interface, Route


def network_config(interfaces: Sequence[Interface], dns: Dns) -> dict[str, Any] | None:
    """None if there is nothing to configure. A NIC is found by its MAC and named as in the pod's network. Of several
    default routes the first of each address family is kept: only one of them could work."""
    if not interfaces:
        return None
    ethernets: dict[str, Any] = {}
    families_with_default: set[int] = set()
    for interface in interfaces:
        ethernet = _link(interface)
        if routes := list(_routes(interface, families_with_default)):
            ethernet["routes"] = routes
        ethernets[interface.name] = ethernet
    _add_nameservers(ethernets[_resolving(interfaces).name], dns)
    return {"version": 2, "ethernets": ethernets}


def _link(interface: Interface) -> dict[str, Any]:
    link: dict[str, Any] = {
        "match": {"macaddress": interface.mac.lower()},
        "set-name": interface.name,
        "dhcp4": False,
        "dhcp6": False,
    }
    if interface.mtu > 0:
        link["mtu"] = interface.mtu
    if interface.addresses:
        link["addresses"] = list(interface.addresses)
    return link


def _resolving(interfaces: Sequence[Interface]) -> Interface:
    """The NIC that carries the DNS settings: the first with an address."""
    return next((interface for interface in interfaces if interface.addresses), interfaces[0])


def _add_nameservers(ethernet: dict[str, Any], dns: Dns) -> None:
    nameservers: dict[str, Any] = {}
    if dns.searches:
        nameservers["search"] = list(dns.searches)
    if dns.servers:
        nameservers["addresses"] = list(dns.servers)
    if nameservers:
        ethernet["nameservers"] = nameservers


def _routes(interface: Interface, families_with_default: set[int]) -> Iterable[dict[str, Any]]:
    own = [ipaddress.ip_interface(address).network for address in interface.addresses]
    for route in interface.routes:
        destination = ipaddress.ip_network(route.destination, strict=False)
        if destination.prefixlen == 0:
            if destination.version in families_with_default:
                continue
            families_with_default.add(destination.version)
        if route.gateway is None and destination in own:
            continue  # the kernel makes it together with the address
        yield _route(route, str(destination), own)


def _route(
    route: Route, destination: str, own: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]
) -> dict[str, Any]:
    """A gateway outside the NIC's own subnets (usual for /32 pod addresses) is said to be on the link, or the guest's
    kernel refuses the route. fe80::/10 is on every link."""
    if route.gateway is None:
        return {"to": destination, "scope": "link"}
    gateway = ipaddress.ip_address(route.gateway)
    result: dict[str, Any] = {"to": destination, "via": route.gateway}
    in_reach = gateway.version == 6 and gateway.is_link_local
    if not in_reach and not any(gateway in network for network in own):
        result["on-link"] = True
    return result
