"""Derives the guest's NICs from a network's CNI result and the kernel's state in the pod's namespace. Pure.

The kernel is authoritative for addresses and routes, because Calico, ptp and Weave set up more than their results say. The result
decides which interfaces count, their order, and gateways that the kernel does not know.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tapmanager.cni.result import CniInterface, CniResult
from tapmanager.links.policy_routes import Policies
from tapmanager.network_values import Dns
from tapmanager.pod import Neighbour, Nic, NicFunction, Route


@dataclass(frozen=True, slots=True)
class KernelRoute:
    """A unicast route of the main table. `gateway`: None means on-link. `mtu`: 0 means the link's."""

    destination: str
    gateway: str | None
    metric: int = 0
    mtu: int = 0


@dataclass(frozen=True, slots=True)
class KernelLink:
    """`kind` is rtnetlink's ("veth", "macvlan"), "" for a device that has none; link-local addresses are left out. `parent`:
    the PCI address of the device whose interface this is, "" for none. `leads_out`: whether the link belongs to a
    device, or its other end or the link beneath it is in another namespace. `alias`: the link's alias, in which the
    plugin host-device keeps the name that the link had on the host.
    `frames`: it carries Ethernet frames. `neighbours`: the permanent ones. `policies`: routes through this link in
    other tables than main, and the rules that choose these tables."""

    name: str
    kind: str
    mac: str
    mtu: int
    addresses: tuple[str, ...] = ()
    routes: tuple[KernelRoute, ...] = ()
    parent: str = ""
    leads_out: bool = False
    alias: str = ""
    frames: bool = True
    neighbours: tuple[Neighbour, ...] = ()
    policies: Policies = Policies()


def ips_of(result: CniResult) -> tuple[str, ...]:
    """The addresses without prefix lengths, the primary one first."""
    return tuple(dict.fromkeys(ip.address.partition("/")[0] for ip in result.ips))


def dns_of(asked: Dns, result: CniResult) -> Dns:
    """The DNS settings: each field from the pod if set, else from the plugin."""
    return Dns(
        asked.servers or result.dns.servers,
        asked.searches or result.dns.searches,
        asked.options or result.dns.options,
    )


def wanted(result: CniResult, links: Sequence[KernelLink]) -> tuple[str, ...]:
    """The names of interfaces in the pod, in the result's order. Old results name none, so addresses decide."""
    named = [interface.name for interface in result.interfaces if interface.sandbox]
    if named:
        return tuple(dict.fromkeys(named))
    ours = set(ips_of(result))
    return tuple(link.name for link in links if ours & {address.partition("/")[0] for address in link.addresses})


def nic_of(
    result: CniResult, link: KernelLink, number: int, random_mac: Callable[[], str], wanted_mac: str = ""
) -> Nic:
    """The guest's NIC for the link, from the network's result. `number` is used in the names of its bridge and tap.
    `wanted_mac`: the guest's, "" for the link's."""
    addresses = _addresses(result, link)
    on_link = tuple(_as_on_link(address, link) for address in addresses)
    return Nic(
        link=link.name,
        mac=wanted_mac or link.mac,
        link_mac=random_mac(),
        bridge=f"br{number}",
        bridge_mac=random_mac(),
        tap=f"tap{number}",
        mtu=link.mtu,
        addresses=on_link,
        routes=_routes(result, link, on_link),
        link_addresses=addresses,
        link_routes=tuple(Route(route.destination, route.gateway) for route in _sorted(link.routes)),
        route_mtu=_route_mtu(link),
        neighbours=link.neighbours,
        rules=link.policies.rules,
        table_routes=link.policies.routes,
    )


def _route_mtu(link: KernelLink) -> int:
    """The smallest MTU of the routes if it is smaller than the link's (Cilium's tunnels); else 0. The guest uses it for the
    whole NIC, because neither DHCP nor most renderers of cloud-init support an MTU per route. IPv6 does not work below 1280."""
    least = 1280 if any(":" in address for address in link.addresses) else 68
    found = min((route.mtu for route in link.routes if route.mtu), default=link.mtu)
    return max(found, least) if found < link.mtu else 0


def function_of(result: CniResult, link: KernelLink, pci: str, driver: str) -> NicFunction:
    """The network card's function behind the link, which the VM gets directly."""
    addresses = _addresses(result, link)
    if link.routes:
        addresses = tuple(_as_on_link(address, link) for address in addresses)
    return NicFunction(
        link=link.name,
        pci=pci,
        driver=driver,
        mac=link.mac,
        mtu=link.mtu,
        addresses=addresses,
        routes=_routes(result, link if link.addresses else dataclasses.replace(link, addresses=addresses), addresses),
        link_addresses=link.addresses if driver else (),
        alias=link.alias,
        rules=link.policies.rules,
        table_routes=link.policies.routes,
    )


def link_from_result(result: CniResult, name: str) -> KernelLink:
    """The link as the kernel would show it if the plugin had made an interface. A plugin that finds its function at VFIO runs
    IPAM, but sets the addresses nowhere. `mac` is "" and `mtu` 0 if the result lacks them. See CNI's `ipam.ConfigureIface`."""
    said = next((one for one in result.interfaces if one.sandbox and one.name == name), CniInterface(name, "pod"))
    mine = [ip for ip in result.ips if _interface_of(ip.interface, result) in (None, name)]
    gateways: dict[int, str] = {}
    for ip in mine:
        if ip.gateway:
            gateways.setdefault(ipaddress.ip_address(ip.gateway).version, ip.gateway)
    subnets = [ipaddress.ip_interface(ip.address).network for ip in mine]
    routes = [KernelRoute(str(subnet), None) for subnet in subnets if subnet.prefixlen < subnet.max_prefixlen]
    for route in result.routes:
        gateway = route.gateway or gateways.get(ipaddress.ip_network(route.destination).version)
        routes.append(KernelRoute(route.destination, gateway))
    return KernelLink(name, "", said.mac, said.mtu, tuple(ip.address for ip in mine), tuple(routes))


def _addresses(result: CniResult, link: KernelLink) -> tuple[str, ...]:
    """The link's addresses, those of the result first and in its order; only the result's if the kernel shows none."""
    order = {ip.address.partition("/")[0]: at for at, ip in enumerate(result.ips)}
    if link.addresses:
        return tuple(sorted(link.addresses, key=lambda address: order.get(address.partition("/")[0], len(order))))
    return tuple(ip.address for ip in result.ips if _interface_of(ip.interface, result) in (None, link.name))


def _interface_of(index: int | None, result: CniResult) -> str | None:
    found: CniInterface | None = None if index is None else result.interfaces[index]
    return None if found is None else found.name


def _as_on_link(address: str, link: KernelLink) -> str:
    """Changes the prefix to /32 or /128 if the namespace has no on-link route for the subnet: ptp and Calico route even
    neighbours through a gateway, so a guest would get no answer to ARP for them."""
    interface = ipaddress.ip_interface(address)
    connected = any(route.gateway is None and route.destination == str(interface.network) for route in link.routes)
    if connected or not link.addresses:
        return address
    return f"{interface.ip}/{interface.max_prefixlen}"


def _routes(result: CniResult, link: KernelLink, addresses: Sequence[str]) -> tuple[Route, ...]:
    """The link's routes except those that the addresses imply, then routes that only the result has. A gateway that is not
    on-link gets a host route. On-link routes come first, so that each gateway is reachable when it is used."""
    subnets = [ipaddress.ip_interface(address).network for address in addresses]
    families = {subnet.version for subnet in subnets}
    implied = {str(subnet) for subnet in subnets}
    found: dict[str, str | None] = {}
    for route in (*_sorted(link.routes), *_extra(result, link)):
        if route.gateway is None and route.destination in implied:
            continue
        if ipaddress.ip_network(route.destination).version in families:
            found.setdefault(route.destination, route.gateway)
    for gateway in [gateway for gateway in found.values() if gateway is not None]:
        if not _reachable(gateway, [*subnets, *(ipaddress.ip_network(to) for to, via in found.items() if via is None)]):
            host = ipaddress.ip_interface(gateway)
            found[f"{host.ip}/{host.max_prefixlen}"] = None
    return tuple(Route(to, via) for to, via in sorted(found.items(), key=_route_order))


def _extra(result: CniResult, link: KernelLink) -> list[KernelRoute]:
    """Routes of the result that are in none of the kernel's tables, if one of this link's addresses has a gateway for them."""
    have = {route.destination for route in link.routes} | {route.destination for route in link.policies.routes}
    mine = {address.partition("/")[0] for address in link.addresses}
    gateways: dict[int, str] = {}
    for ip in result.ips:
        owner = _interface_of(ip.interface, result)
        if ip.gateway and (owner == link.name if owner else ip.address.partition("/")[0] in mine):
            gateways.setdefault(ipaddress.ip_address(ip.gateway).version, ip.gateway)
    extra = []
    for route in result.routes:
        via = route.gateway or gateways.get(ipaddress.ip_network(route.destination).version)
        if route.destination not in have and via in gateways.values():
            extra.append(KernelRoute(route.destination, via))
    return extra


def _sorted(routes: Sequence[KernelRoute]) -> list[KernelRoute]:
    """On-link routes before gateway routes, and better metrics first."""
    return sorted(routes, key=lambda route: (route.gateway is not None, route.metric))


def _route_order(item: tuple[str, str | None]) -> tuple[bool, int, str]:
    """On-link routes first, then the longest prefix, so default routes come last."""
    destination, gateway = item
    return gateway is not None, -ipaddress.ip_network(destination).prefixlen, destination


def _reachable(gateway: str, networks: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    address = ipaddress.ip_address(gateway)
    # fe80::/10 is always on-link, and routers announce themselves with such addresses.
    return (address.is_link_local and address.version == 6) or any(address in network for network in networks)
