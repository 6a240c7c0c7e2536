"""Assigns a pod's interfaces to its networks, and decides what the guest gets for each. Pure.

A meta plugin returns only the first network's result. The other networks are known from its records (`delegate_records`), or else
from the links: each link that leads out of the namespace connects the pod, so the guest gets it. Links that lead nowhere (dummy,
bridge, a tunnel that the kernel makes in each namespace) are a plugin's internals.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tapmanager.cni.conf import IFNAME
from tapmanager.cni.delegate_records import Delegate
from tapmanager.cni.result import CniResult, CniRoute
from tapmanager.errors import TapmanagerError, internal
from tapmanager.fields import Json, objects
from tapmanager.links import nic_plan
from tapmanager.links.nic_plan import KernelLink
from tapmanager.network_values import Dns
from tapmanager.pod import Nic, NicFunction, Route

# Kinds that receive only frames for their own MAC, so frames for a guest behind a bridge would not arrive.
_ONE_MAC_KINDS = frozenset({"macvlan", "macvtap", "ipvlan", "ipvtap"})
_NOTHING = CniResult((), (), (), Dns())
_ALL_FAMILIES = frozenset({4, 6})


@dataclass(frozen=True, slots=True)
class Network:
    """`name`: "" if unknown. `interfaces`: the network's interfaces in the pod, also those that its result only names.
    `device`, `kinds`: see `Delegate`. `defaults`: the address families (4, 6) in which the network's default route is used."""

    name: str
    result: CniResult
    interfaces: tuple[str, ...]
    device: str = ""
    kinds: tuple[str, ...] = ()
    defaults: frozenset[int] = _ALL_FAMILIES

    def pci_of(self, interface: str) -> str:
        """The PCI address that the result names for the interface; "" for none."""
        said = (one.pci for one in self.result.interfaces if one.sandbox and one.name == interface)
        return next(said, "") or self.device

    def label(self, interface: str) -> str:
        return f'CNI interface "{interface}"' + (f' of network "{self.name}"' if self.name else "")


def networks_of(result: CniResult, links: Sequence[KernelLink], delegates: Sequence[Delegate]) -> tuple[Network, ...]:
    """The pod's networks in the guest's order: the first, whose result the plugin returned, then by interface name."""
    records = {delegate.interface: delegate for delegate in delegates}
    first = _first(result, links, records.pop(IFNAME, None))
    known, others = set(first.interfaces), []
    for record in records.values():
        network = _recorded(record, links)
        if network.interfaces and known.isdisjoint(network.interfaces):
            known |= set(network.interfaces)
            others.append(network)
    # A link that has no record and carries no Ethernet frames (a tunnel) is internal to a plugin. If it belonged to a network, a
    # record would name it.
    found = [link.name for link in links if link.leads_out and link.frames]
    others += [Network("", _NOTHING, (name,)) for name in found if name not in known]
    return (first, *sorted(others, key=lambda network: _by_number(network.interfaces[0])))


def _first(result: CniResult, links: Sequence[KernelLink], record: Delegate | None) -> Network:
    """The first network. If a pod wants the default route of another network, Multus removes the first network's
    default route from its record and, in some versions, from the namespace. The result that Multus returns still has
    the route."""
    if record is None:
        return Network("", result, nic_plan.wanted(result, links))
    defaults = _ALL_FAMILIES - (_with_default(result) - _with_default(record.result))
    routes = tuple(route for route in result.routes if _family(route) in defaults or not _is_default(route))
    result = dataclasses.replace(result, routes=routes)
    interfaces = nic_plan.wanted(result, links)
    return Network(record.network, result, interfaces, record.device, record.kinds, defaults)


def _recorded(record: Delegate, links: Sequence[KernelLink]) -> Network:
    """The network that a record describes. It has no interface if its plugins only change existing ones (tuning, portmap)."""
    names = tuple(dict.fromkeys(one.name for one in record.result.interfaces if one.sandbox))
    if not names and (record.result.ips or any(link.name == record.interface for link in links)):
        names = (record.interface,)
    defaults = frozenset(_with_default(record.result))
    return Network(record.network, record.result, names, record.device, record.kinds, defaults)


def functions_of(
    networks: Sequence[Network], links: Sequence[KernelLink], functions: Mapping[str, str], drivers: Mapping[str, str]
) -> tuple[NicFunction, ...]:
    """The functions of network cards that go into the VM. `functions`: link name -> PCI address. A function that the
    plugin found at VFIO has no link, because the plugin configures such a function on the card only. `drivers`: by PCI
    address."""
    by_name = {link.name: link for link in links}
    found = []
    for network in networks:
        for name in network.interfaces:
            if name in functions:
                pci = functions[name]
                found.append(nic_plan.function_of(network.result, by_name[name], pci, drivers[pci]))
            elif name not in by_name and is_vfio(drivers.get(network.pci_of(name), "")):
                link = nic_plan.link_from_result(network.result, name)
                found.append(nic_plan.function_of(network.result, link, network.pci_of(name), ""))
    return tuple(found)


def is_vfio(driver: str) -> bool:
    """vfio-pci and its variants: mlx5_vfio_pci, hisi-acc-vfio-pci."""
    return "vfio" in driver.replace("-", "_").split("_")


def nics_of(
    networks: Sequence[Network],
    links: Sequence[KernelLink],
    random_mac: Callable[[], str],
    functions: Collection[str] = (),
    macs: Mapping[str, str] | None = None,
) -> tuple[Nic, ...]:
    """One NIC for each interface that is not one of the cards' `functions`. `macs`: the MACs that the pod
    asks for, by interface name. Raises TapmanagerError."""
    by_name = {link.name: link for link in links}
    taken = set(by_name)
    nics: list[Nic] = []
    given = {name for network in networks for name in network.interfaces}
    not_ours = [link for link in links if link.name not in given]
    if not networks[0].result.ips:
        raise internal("the CNI result has no IP address; configure an IPAM plugin in the network's CNI config")
    for network in networks:
        for name in network.interfaces:
            link = by_name.get(name)
            if link is not None:
                _refuse_policies(network, link, not_ours)
            if name in functions:
                continue
            if (link is None or not link.frames) and network.pci_of(name) and network is not networks[0]:
                continue  # no Ethernet link, not at VFIO (vDPA, InfiniBand): the VM gets it if kubelet granted it
            if link is None:
                raise _nowhere(network, name)
            _refuse_unfit(network, link)
            number = _free_number(taken, len(nics))
            taken |= {f"br{number}", f"tap{number}"}
            nics.append(nic_plan.nic_of(network.result, link, number, random_mac, (macs or {}).get(name, "")))
    if not networks[0].interfaces:
        raise internal("the CNI result has no interface in the pod, and none in its namespace carries its address")
    return tuple(nics)


def not_given(networks: Sequence[Network], given: Sequence[Nic | NicFunction]) -> Iterator[str]:
    """Messages about interfaces for which the guest gets no NIC."""
    links = {one.link for one in given}
    for network in networks:
        for name in network.interfaces:
            if name not in links:
                device = network.pci_of(name)
                yield f"{network.label(name)} has no link in the pod; the guest gets its device {device} if kubelet granted it"


def _nowhere(network: Network, name: str) -> TapmanagerError:
    device = network.pci_of(name)
    if device:
        return internal(
            f"{network.label(name)} has no Ethernet link in the pod's network namespace, and its device {device} is not at VFIO "
            "either: bind it to vfio-pci, or to its network driver"
        )
    return internal(
        f"{network.label(name)} is not in the pod's network namespace, and its PCI device is not known: for SR-IOV "
        "use Multus with a resource name, or functions at their kernel driver; only Ethernet links and PCI devices can be "
        "a virtual machine's"
    )


def _refuse_unfit(network: Network, link: KernelLink) -> None:
    if link.kind in _ONE_MAC_KINDS or not link.frames:
        remedy = (
            "use a network whose plugin makes a veth pair (bridge, ptp, Calico, Flannel, Cilium) or gives a VF (sriov)"
        )
        if link.kind == "netkit":
            remedy = "with Cilium, set bpf.datapathMode=veth"
        what = f"{network.label(link.name)} is of kind {link.kind or 'unknown'}"
        raise TapmanagerError("unimplemented", f"{what}, which cannot carry a virtual machine's frames; {remedy}")


def refuse_packet_rules(network: str, found: str) -> None:
    """`found`: a rule that plugins left in the pod's namespace, "" for none. Raises TapmanagerError."""
    if found:
        message = (
            f"CNI network \"{network}\" has rules for packets in the pod's namespace ({found}), which a virtual machine's "
            "packets pass as frames, so the rules have no effect on them: remove the plugin that makes the rules; turn a "
            "service mesh off by the pod's labels (Istio's ambient mode: istio.io/dataplane-mode: none)"
        )
        raise TapmanagerError("unimplemented", message)


def _refuse_policies(network: Network, link: KernelLink, not_ours: Sequence[KernelLink]) -> None:
    """`not_ours`: links that the guest does not get. If a routing table has routes through such a link, the guest could get only
    a part of the table."""
    wrong = link.policies.refused
    for rule in link.policies.rules:
        beside = [other.name for other in not_ours if rule in other.policies.rules]
        wrong += tuple(f"{rule.priority}: lookup {rule.table}: dev {name}" for name in beside)
    if wrong:
        raise _no_policies(
            network.label(link.name), wrong[0], "remove it, or the plugin that makes it, from the network"
        )


def refuse_policies(given: Sequence[Nic | NicFunction]) -> None:
    """Refuses policy routes, for a caller that does not give them to the guest. Raises TapmanagerError."""
    for one in given:
        for rule in one.rules:
            label, what = f'CNI interface "{one.link}"', f"{rule.priority}: lookup {rule.table}"
            raise _no_policies(label, what, "restart virtshim, which is of an earlier version")


def _no_policies(label: str, rule: str, remedy: str) -> TapmanagerError:
    what = f"{label} has routes outside the main table that a virtual machine cannot get"
    return TapmanagerError("unimplemented", f"{what} (rule {rule}); {remedy}")


def _free_number(taken: set[str], at_least: int) -> int:
    number = at_least
    while {f"br{number}", f"tap{number}"} & taken:
        number += 1
    return number


def with_one_default(
    networks: Sequence[Network], nics: Sequence[Nic], functions: Sequence[NicFunction]
) -> tuple[tuple[Nic, ...], tuple[NicFunction, ...]]:
    """Keeps one default route in each address family: that of the first network with one. Plugins add default routes
    beside existing ones, and a guest that uses DHCP on each NIC could choose any of them."""
    by_link: dict[str, Nic | NicFunction] = {nic.link: nic for nic in nics}
    by_link |= {function.link: function for function in functions}
    routes: dict[str, tuple[Route, ...]] = {}
    open_families = _ALL_FAMILIES
    for network in networks:
        for name in network.interfaces:
            if name in by_link:
                kept = [
                    route
                    for route in by_link[name].routes
                    if not _is_default(route) or _family(route) in open_families & network.defaults
                ]
                routes[name] = tuple(kept)
                open_families -= {_family(route) for route in kept if _is_default(route)}
    return (
        tuple(dataclasses.replace(nic, routes=routes[nic.link]) for nic in nics),
        tuple(dataclasses.replace(function, routes=routes[function.link]) for function in functions),
    )


def _with_default(result: CniResult) -> set[int]:
    return {_family(route) for route in result.routes if _is_default(route)}


def _family(route: Route | CniRoute) -> int:
    return ipaddress.ip_network(route.destination).version


def _is_default(route: Route | CniRoute) -> bool:
    return ipaddress.ip_network(route.destination).prefixlen == 0


def in_guest_order(result: Json, names: Sequence[str]) -> Sequence[str]:
    """The first network's interfaces in the order of its `result`, then the others. Old results name no interfaces."""
    first = [one.get("name") for one in objects(result, "interfaces", "result") if one.get("sandbox")] or [IFNAME]
    return sorted(names, key=lambda name: (first.index(name) if name in first else len(first), _by_number(name)))


def _by_number(name: str) -> tuple[tuple[int, str], ...]:
    """A sort key that puts net2 before net10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name) if part)
