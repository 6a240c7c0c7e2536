"""Granted nodes, CDI addresses and kubelet's list -> authority. Reads sysfs; reports only missing devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from virtshim.devices.authority import Authority
from virtshim.devices.classify import Meaning, VfioDirectory, VfioFunction, VfioGroup, VfioMdev
from virtshim.devices.host_files import HostFiles
from virtshim.devices.pci import PciBus, addresses_of, is_uuid, last_address
from virtshim.domain.devices.granted import KubeletGrant, PciAddress, UsbDevice, VdpaDevice


@dataclass(slots=True)
class GrantCollector:
    """Fills up source by source; `authority` is what came together. `faults`: (node or name, why it is of no use)."""

    files: HostFiles
    faults: list[tuple[str, str]] = field(default_factory=list)
    _wants_mdev: bool = False
    _groups: dict[int, set[PciAddress]] = field(default_factory=dict)
    _named: set[PciAddress] = field(default_factory=set)
    _unconditional: set[PciAddress] = field(default_factory=set)
    _if_hinted: set[PciAddress] = field(default_factory=set)
    _mdevs: set[str] = field(default_factory=set)
    _used: set[PciAddress] = field(default_factory=set)
    _others: set[UsbDevice | VdpaDevice] = field(default_factory=set)

    def node(self, path: str, meaning: Meaning) -> None:
        """What has nothing to do with passing devices is left to the caller."""
        if isinstance(meaning, VfioGroup):
            self._group(path, meaning.number)
        elif isinstance(meaning, VfioFunction):
            self._function(meaning.address)
        elif isinstance(meaning, VfioMdev):
            self._mdevs.add(meaning.uuid)
        elif isinstance(meaning, VfioDirectory):
            self._wants_mdev = True
        elif isinstance(meaning, UsbDevice):
            self._others.add(meaning)
        elif isinstance(meaning, VdpaDevice):
            self._others.add(meaning)
            node = self.files.node(meaning.path)
            parent = last_address(self.files.target(f"/sys/dev/char/{node.major}:{node.minor}"))
            self._used.update([parent] if parent is not None else ())

    def cdi(self, addresses: Iterable[PciAddress]) -> None:
        for address in addresses:
            if PciBus(self.files).function(address) is None:
                self.faults.append(("CDI", f"PCI function {address}, which a specification names (bdf), is missing"))
            self._named.add(address)
            self._unconditional.add(address)

    def kubelet(self, grants: Iterable[KubeletGrant]) -> None:
        """A VF without a node is at a kernel driver: the VM gets it. Another function might have been granted for what its
        driver does, so it takes a hint as well."""
        bus = PciBus(self.files)
        for grant in grants:
            for address in addresses_of(grant.ids):
                facts = bus.function(address)
                if facts is None or facts.is_bridge:
                    continue
                self._named.add(address)
                is_vf = facts.physical is not None
                (self._unconditional if is_vf and not grant.of_pod else self._if_hinted).add(address)
            if self._wants_mdev:
                self._mdevs.update(uuid for uuid in grant.ids if is_uuid(uuid))

    @property
    def lacks_mdev(self) -> bool:
        """A node grants some mediated device, and nothing says which."""
        return self._wants_mdev and not self._mdevs

    def authority(self) -> Authority:
        behind = {address for functions in self._groups.values() for address in functions}
        return Authority(
            groups={number: tuple(sorted(functions)) for number, functions in self._groups.items()},
            named=frozenset(self._named),
            unconditional=frozenset(self._unconditional - behind),
            if_hinted=frozenset(self._if_hinted - behind),
            mdevs=frozenset(self._mdevs),
            used=frozenset(self._used),
            others=frozenset(self._others),
        )

    def _group(self, path: str, number: int) -> None:
        bus = PciBus(self.files)
        members = bus.members(number)
        mdevs = {name for name in members if is_uuid(name)}
        facts = [bus.function(address) for address in addresses_of(members)]
        functions = {one.address for one in facts if one is not None and not one.is_bridge}
        if not mdevs and not functions:
            what = "holds nothing that a VM can have" if members else "is not there"
            self.faults.append(
                (path, f"IOMMU group {number} {what}; check that the device plugin still runs, then delete the pod")
            )
            return
        self._mdevs |= mdevs
        if functions:
            self._groups.setdefault(number, set()).update(functions)

    def _function(self, address: PciAddress) -> None:
        facts = PciBus(self.files).function(address)
        if facts is None or facts.group is None:
            self._unconditional.add(address)
        else:
            self._groups.setdefault(facts.group, set()).add(address)


def resources(grants: Sequence[KubeletGrant], authority: Authority) -> dict[str, str]:
    """Claim -> kubelet's name of the resource, as far as its list says. Plugins that count in IOMMU groups come last: small
    numbers may mean anything."""
    names: dict[str, str] = {}
    for grant in grants:
        for address in addresses_of(grant.ids):
            names.setdefault(f"pci:{address}", grant.resource)
        for name in grant.ids:
            if is_uuid(name):
                names.setdefault(f"mdev:{name}", grant.resource)
    for number, functions in authority.groups.items():
        owners = [grant.resource for grant in grants if str(number) in grant.ids]
        for address in functions if len(owners) == 1 else ():
            names.setdefault(f"pci:{address}", owners[0])
    return names
