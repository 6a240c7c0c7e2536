"""Which PCI functions kubelet is offered as which resource, and in which order they are best allocated. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from virtshim.devices.values import PciAddress


@dataclass(frozen=True, slots=True)
class HostFunction:
    """A function as sysfs shows it. `vendor` and `device`: four hex digits in lower case. `driver`: "" for none.
    `is_vfio`: the driver hands the function to user space. `is_busy`: the driver uses the function for the node, so
    that VFIO gives away nothing of the group. `group`: None without an IOMMU. `numa`: None if unknown. `physfn`: the PF
    of a VF. `has_vfio_node`: /dev/vfio/<group> exists. `is_reserved`: no VM gets it. `trouble`: a fault of the device,
    "" if none is known."""

    address: PciAddress
    vendor: str
    device: str
    driver: str = ""
    is_vfio: bool = False
    group: int | None = None
    numa: int | None = None
    physfn: PciAddress | None = None
    has_vfio_node: bool = False
    is_busy: bool = False
    is_reserved: bool = False
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Pool:
    """A resource of this node: the functions that match all criteria that are set.

    `resource`: domain/name, as pods request it. `devices`: device ids of the `vendor`. `drivers`: the drivers that a
    function may be bound to, empty for VFIO's. A function that fails only this criterion is offered as unhealthy, so
    that it is noticed.
    """

    resource: str
    vendor: str = ""
    devices: frozenset[str] = frozenset()
    drivers: frozenset[str] = frozenset()
    pfs: frozenset[PciAddress] = frozenset()
    addresses: frozenset[PciAddress] = frozenset()
    functions: Literal["any", "virtual", "physical"] = "any"

    def matches(self, facts: HostFunction) -> bool:
        return (
            (not self.vendor or facts.vendor == self.vendor)
            and (not self.devices or facts.device in self.devices)
            and (not self.pfs or facts.physfn in self.pfs)
            and (not self.addresses or facts.address in self.addresses)
            and (self.functions == "any" or (facts.physfn is not None) == (self.functions == "virtual"))
        )

    @property
    def variable(self) -> str:
        """The environment variable with the addresses, named as by the SR-IOV network device plugin, dashes kept."""
        return variable_of(self.resource)


def variable_of(resource: str) -> str:
    return "PCIDEVICE_" + re.sub(r"[./]", "_", resource.upper())


def socket_of(resource: str) -> str:
    """The name of its socket in kubelet's directory."""
    return f"virtshim-{resource.replace('/', '_')}.sock"


@dataclass(frozen=True, slots=True)
class Offer:
    """One device of a resource: an IOMMU group, because a group cannot be split. `functions`: the functions of the
    group that match the pool, in order. `fault`: why it cannot be allocated now, "" if it can."""

    functions: tuple[PciAddress, ...]
    group: int | None
    numa: int | None
    fault: str = ""

    @property
    def id(self) -> str:
        """The device's id for kubelet."""
        return str(self.functions[0])

    @property
    def nodes(self) -> tuple[str, ...]:
        return ("/dev/vfio/vfio", f"/dev/vfio/{self.group}")


def offers(pool: Pool, node: Iterable[HostFunction]) -> tuple[Offer, ...]:
    """What the pool offers, by address. A function without a group is offered alone."""
    grouped: dict[object, list[HostFunction]] = {}
    busy: dict[int | None, list[HostFunction]] = {}
    for facts in sorted(node, key=lambda facts: facts.address):
        if pool.matches(facts):
            grouped.setdefault(facts.address if facts.group is None else facts.group, []).append(facts)
        elif facts.is_busy and facts.group is not None:
            busy.setdefault(facts.group, []).append(facts)
    return tuple(_offer(pool, members, busy.get(members[0].group, ())) for members in grouped.values())


def _offer(pool: Pool, members: Sequence[HostFunction], busy: Sequence[HostFunction]) -> Offer:
    """`busy`: other functions of the group."""
    faults = [fault for fault in (_fault(pool, facts) for facts in members) if fault]
    faults += (
        f"IOMMU group {facts.group} also has {facts.address}, which is bound to {facts.driver}: bind it to vfio-pci or unbind it"
        for facts in busy
    )
    first = members[0]
    return Offer(tuple(facts.address for facts in members), first.group, first.numa, "; ".join(faults))


def _fault(pool: Pool, facts: HostFunction) -> str:
    if facts.is_reserved:
        return f"{facts.address} is reserved for the node (devices.keep)"
    if facts.trouble:
        return f"{facts.address} {facts.trouble}"
    if facts.group is None:
        return f"{facts.address} has no IOMMU group: enable the IOMMU in firmware and kernel (intel_iommu=on)"
    if not (facts.driver in pool.drivers if pool.drivers else facts.is_vfio):
        bound = f"bound to {facts.driver}" if facts.driver else "bound to no driver"
        return f"{facts.address} is {bound}, not to {' or '.join(sorted(pool.drivers)) or 'vfio-pci'}"
    if not facts.has_vfio_node:
        return f"/dev/vfio/{facts.group} does not exist: load vfio-pci and check the kernel log"
    return ""


def overlap(pools: Mapping[str, Sequence[Offer]]) -> Mapping[str, str]:
    """Groups that two resources offer, such as "0000:3b:00.1": "a/x and b/y". kubelet counts each resource by itself,
    and would allocate such a device twice."""
    by_group: dict[str, list[str]] = {}
    for resource, offered in pools.items():
        for offer in offered:
            by_group.setdefault(offer.id if offer.group is None else f"group {offer.group}", []).append(resource)
    return {group: " and ".join(resources) for group, resources in by_group.items() if len(resources) > 1}


def preferred(offered: Sequence[Offer], available: Sequence[str], must: Sequence[str], size: int) -> tuple[str, ...]:
    """The ids that are best allocated together: the required ones, then, if possible, all from one NUMA node. Of those
    nodes the one with the fewest devices left is best, so that large nodes stay whole. Sorted by address within a
    node."""
    chosen = list(dict.fromkeys(must))
    numa = {offer.id: offer.numa for offer in offered}
    free = set(available) - set(chosen)
    rest = [device for device in numa if device in free]
    often = Counter(numa[device] for device in rest)
    wanted = size - len(chosen)
    near = {numa[device] for device in chosen if device in numa}

    def rank(device: str) -> tuple[bool, bool, int, int]:
        node = numa[device]
        peers = often[node]
        return node not in near if near else False, peers < wanted, peers, -1 if node is None else node

    return tuple([*chosen, *sorted(rest, key=rank)][: max(size, 0)])
