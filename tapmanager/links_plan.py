"""From a CNI result and what the kernel shows in the pod's namespace to the guest's NICs. Pure.

The kernel is the truth about addresses and routes (Calico, ptp and Weave set up more than their results say); the result
decides which interfaces count, their order, and gateways the kernel does not know.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tapmanager.cni_result import CniInterface, CniResult
from tapmanager.errors import NetError, internal
from tapmanager.pod import Dns, Nic, NicFunction, Route


@dataclass(frozen=True, slots=True)
class KernelRoute:
    """Of the main table, unicast; `gateway` None means on-link."""

    destination: str
    gateway: str | None
    metric: int = 0


@dataclass(frozen=True, slots=True)
class KernelLink:
    """`kind` is rtnetlink's ("veth", "macvlan"), "" for a device that has none; link-local addresses are left out. `parent`: the
    PCI address of the device that it is an interface of, "" for none."""

    name: str
    kind: str
    mac: str
    mtu: int
    addresses: tuple[str, ...] = ()
    routes: tuple[KernelRoute, ...] = ()
    parent: str = ""


# These answer to one MAC only, the device's own: frames for a guest behind a bridge would not arrive.
_USUAL_MTU = 1500
_ONE_MAC_KINDS = frozenset({"macvlan", "macvtap", "ipvlan", "ipvtap"})


def ips_of(result: CniResult) -> tuple[str, ...]:
    """Bare addresses, primary first."""
    return tuple(dict.fromkeys(ip.address.partition("/")[0] for ip in result.ips))


def dns_of(asked: Dns, result: CniResult) -> Dns:
    """The pod's own DNS settings, field by field, laid over the plugin's."""
    return Dns(
        asked.servers or result.dns.servers,
        asked.searches or result.dns.searches,
        asked.options or result.dns.options,
    )


def plan(
    result: CniResult, links: Sequence[KernelLink], random_mac: Callable[[], str], functions: Collection[str] = ()
) -> tuple[Nic, ...]:
    """One NIC for each interface the result puts in the pod, but for those that are `functions` of a card: they go into the VM
    themselves. Raises NetError."""
    if not result.ips:
        raise internal("the CNI result has no IP address; configure an IPAM plugin in the network's CNI config")
    by_name = {link.name: link for link in links}
    taken = set(by_name)
    nics: list[Nic] = []
    for name in _wanted(result, links):
        if name in functions:
            continue
        link = by_name.get(name)
        if link is None:
            raise internal(
                f'the CNI result names interface "{name}", which is not in the pod\'s network namespace, and does not tell '
                "which PCI device it is (pciID and mac): for SR-IOV use a plugin of CNI 1.1, or functions at their kernel driver"
            )
        _refuse_unfit(link)
        number = _free_number(taken, len(nics))
        taken |= {f"br{number}", f"tap{number}"}
        nics.append(_nic(result, link, number, random_mac))
    if not nics and not functions:
        raise internal("the CNI result has no interface in the pod, and none in its namespace carries its address")
    return tuple(nics)


def plan_functions(
    result: CniResult, links: Sequence[KernelLink], functions: Mapping[str, str], drivers: Mapping[str, str]
) -> tuple[NicFunction, ...]:
    """The functions of network cards that go into the VM: `functions` by link name -> PCI address, also those of networks that
    the result does not speak of (Multus tells of the first alone); and interfaces of the result without a link, for a plugin
    that found its function at VFIO configures it from the card's side only. `drivers`: by PCI address."""
    by_name = {link.name: link for link in links}
    wanted = _wanted(result, links)
    found = [
        _function(result, by_name[name], pci, drivers[pci], named=name in wanted) for name, pci in functions.items()
    ]
    for interface in result.interfaces:
        if interface.sandbox and interface.name not in by_name and interface.pci and interface.mac:
            link = KernelLink(interface.name, "", interface.mac, interface.mtu or _USUAL_MTU)
            found.append(_function(result, link, interface.pci, "", named=True))
    return tuple(found)


def _function(result: CniResult, link: KernelLink, pci: str, driver: str, *, named: bool) -> NicFunction:
    """`named`: the result speaks of it; else its addresses are those that it has."""
    addresses = _addresses(result, link) if named else link.addresses
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
        link_addresses=link.addresses,
    )


def _wanted(result: CniResult, links: Sequence[KernelLink]) -> list[str]:
    """Interface names: those in the pod, in the result's order. Old results name none: then by address."""
    named = [interface.name for interface in result.interfaces if interface.sandbox]
    if named:
        return list(dict.fromkeys(named))
    ours = set(ips_of(result))
    return [link.name for link in links if ours & {address.partition("/")[0] for address in link.addresses}]


def _refuse_unfit(link: KernelLink) -> None:
    if link.kind in _ONE_MAC_KINDS:
        message = (
            f'CNI interface "{link.name}" is of kind {link.kind}, which cannot carry a virtual machine\'s frames; '
            "use a network whose plugin makes a veth pair (bridge, ptp, Calico, Flannel, Cilium)"
        )
        raise NetError("unimplemented", message)


def _free_number(taken: set[str], at_least: int) -> int:
    number = at_least
    while {f"br{number}", f"tap{number}"} & taken:
        number += 1
    return number


def _nic(result: CniResult, link: KernelLink, number: int, random_mac: Callable[[], str]) -> Nic:
    addresses = _addresses(result, link)
    on_link = tuple(_as_on_link(address, link) for address in addresses)
    return Nic(
        link=link.name,
        mac=link.mac,
        link_mac=random_mac(),
        bridge=f"br{number}",
        bridge_mac=random_mac(),
        tap=f"tap{number}",
        mtu=link.mtu,
        addresses=on_link,
        routes=_routes(result, link, on_link),
        link_addresses=addresses,
        link_routes=tuple(Route(route.destination, route.gateway) for route in _sorted(link.routes)),
    )


def _addresses(result: CniResult, link: KernelLink) -> tuple[str, ...]:
    """The link's addresses with the result's first, in its order; the result's if the kernel shows none."""
    order = {ip.address.partition("/")[0]: at for at, ip in enumerate(result.ips)}
    if link.addresses:
        return tuple(sorted(link.addresses, key=lambda address: order.get(address.partition("/")[0], len(order))))
    return tuple(ip.address for ip in result.ips if _interface_of(ip.interface, result) in (None, link.name))


def _interface_of(index: int | None, result: CniResult) -> str | None:
    found: CniInterface | None = None if index is None else result.interfaces[index]
    return None if found is None else found.name


def _as_on_link(address: str, link: KernelLink) -> str:
    """The prefix becomes a host's (/32, /128) if the namespace had no on-link route for the subnet: ptp and Calico route
    even neighbours through a gateway, and a guest that asked for them by ARP would get no answer."""
    interface = ipaddress.ip_interface(address)
    connected = any(route.gateway is None and route.destination == str(interface.network) for route in link.routes)
    if connected or not link.addresses:
        return address
    return f"{interface.ip}/{interface.max_prefixlen}"


def _routes(result: CniResult, link: KernelLink, addresses: Sequence[str]) -> tuple[Route, ...]:
    """The link's routes without what the addresses imply, then what only the result knows; a gateway that would not be
    on-link gets a host route before it. Sorted: on-link first, so that each gateway is reachable when it is used."""
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
    """Routes of the result that the kernel does not have, if one of this link's addresses has a gateway for them."""
    have = {route.destination for route in link.routes}
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
    """On-link before gateway routes, the better metric first."""
    return sorted(routes, key=lambda route: (route.gateway is not None, route.metric))


def _route_order(item: tuple[str, str | None]) -> tuple[bool, int, str]:
    """On-link first, then the longest prefix; so a default route is last."""
    destination, gateway = item
    return gateway is not None, -ipaddress.ip_network(destination).prefixlen, destination


def _reachable(gateway: str, networks: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    address = ipaddress.ip_address(gateway)
    # fe80::/10 is on-link by definition; routers announce themselves with it.
    return (address.is_link_local and address.version == 6) or any(address in network for network in networks)
