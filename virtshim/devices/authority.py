"""What was granted, by whichever source, and what of it a VM gets. Pure.

Hints choose within the grant; they never add to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from virtshim.devices.hints import Hint
from virtshim.domain.devices.granted import MediatedDevice, Passthrough, PciAddress, PciFunction, UsbDevice, VdpaDevice


@dataclass(frozen=True, slots=True)
class Authority:
    """`groups`: IOMMU groups behind granted nodes, with those of their functions that can be passed. Functions
    named without a node, bound to a kernel driver: `unconditional` those that the VM always gets, `if_hinted` those that it gets
    only where a hint names them too. `named`: functions that kubelet or CDI name one by one, which choose in their group.
    `used`: functions that the VM gets in another form, as a vDPA device."""

    groups: Mapping[int, tuple[PciAddress, ...]] = field(default_factory=dict)
    named: frozenset[PciAddress] = frozenset()
    unconditional: frozenset[PciAddress] = frozenset()
    if_hinted: frozenset[PciAddress] = frozenset()
    mdevs: frozenset[str] = frozenset()
    used: frozenset[PciAddress] = frozenset()
    others: frozenset[UsbDevice | VdpaDevice] = frozenset()

    def grants(self, device: Passthrough) -> bool:
        if isinstance(device, PciFunction):
            behind = any(device.address in functions for functions in self.groups.values())
            return behind or device.address in self.unconditional | self.if_hinted | self.used
        if isinstance(device, MediatedDevice):
            return device.uuid in self.mdevs
        return device in self.others


def chosen(authority: Authority, hinted: Sequence[Hint]) -> list[Passthrough]:
    """Of a group with several functions those that kubelet, CDI or a hint names, else all. No hint adds anything to the
    grant."""
    asked = {hint.device.address for hint in hinted if isinstance(hint.device, PciFunction)}
    addresses = set(authority.unconditional | (authority.if_hinted & asked))
    for functions in authority.groups.values():
        addresses.update([one for one in functions if one in authority.named | asked] or functions)
    devices: list[Passthrough] = [PciFunction(address) for address in sorted(addresses - authority.used)]
    devices += (MediatedDevice(uuid) for uuid in sorted(authority.mdevs))
    devices += sorted(authority.others, key=lambda device: device.claim)
    return devices


def forged(authority: Authority, hinted: Iterable[Hint]) -> list[Hint]:
    """Hints at what was not granted."""
    return [hint for hint in hinted if not authority.grants(hint.device)]


def in_order(devices: Iterable[Passthrough]) -> tuple[Passthrough, ...]:
    """By resource, then by place on the host: a pod that is made anew with the same devices has them at the same places."""

    def key(device: Passthrough) -> tuple[str, str, PciAddress, str]:
        address = device.address if isinstance(device, PciFunction) else PciAddress(0, 0, 0, 0)
        return (device.resource, type(device).__name__, address, device.claim)

    return tuple(sorted(devices, key=key))
