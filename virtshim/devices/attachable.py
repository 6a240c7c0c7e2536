"""Whether devices can be given to a VM now. Every fault says what is wrong and what to do, for libvirt's and QEMU's own errors
come late and say little: `group 5 is not viable`, `failed to open /dev/vfio/9`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.devices.granted import addresses_of
from virtshim.devices.host_files import HostFiles, NodeKind
from virtshim.devices.host_use import used_by_host
from virtshim.devices.memory_lock import EXTRA
from virtshim.devices.pci import FUNCTIONS, GROUPS, PciBus, PciFacts
from virtshim.domain.devices import (
    MediatedDevice,
    Passthrough,
    PciAddress,
    PciFunction,
    UsbDevice,
    VdpaDevice,
)

_USB: Final = "/sys/bus/usb/devices"
_HUB: Final = "09"
NO_IOMMU: Final = (
    "the IOMMU is off: switch VT-d or AMD-Vi on in the BIOS, boot the kernel with intel_iommu=on (AMD needs no option), and "
    "look for DMAR or AMD-Vi in dmesg"
)


@dataclass(frozen=True, slots=True)
class Rules:
    """`bind`: whoever attaches binds a function of another driver first. `keep`: functions that no VM gets. `lockable`:
    bytes of memory that QEMU may lock, asked for only when needed; None for no limit."""

    bind: bool
    keep: Collection[PciAddress]
    lockable: Callable[[], int | None]


class Attachable:
    def __init__(self, files: HostFiles, rules: Rules) -> None:
        self._files = files
        self._bus = PciBus(files)
        self._rules = rules

    def faults(self, devices: Sequence[Passthrough], guest_memory: int, claimed: Mapping[str, str]) -> list[str]:
        """[] if all can be attached together."""
        faults: list[str] = []
        together = {device.address for device in devices if isinstance(device, PciFunction)}
        used = used_by_host(self._files) if together else {}
        for device in devices:
            words = _words(device)
            faults += (f"{words} {fault}" for fault in self._device(device, together, used))
            if device.claim in claimed:
                faults.append(
                    f"{words} belongs to {claimed[device.claim]}; delete that pod, or look why both were granted it"
                )
        if any(not isinstance(device, UsbDevice) for device in devices):
            faults += self._memory(guest_memory)
        return faults

    def function_faults(
        self, facts: PciFacts, used: Mapping[PciAddress, str], together: Collection[PciAddress] = ()
    ) -> Iterator[str]:
        """Of one function, each the rest of a sentence about it. `together`: functions that go into the VM with it."""
        if facts.is_bridge:
            yield "is a PCI bridge, which no VM can have; grant what is behind it"
            return
        if facts.address in self._rules.keep:
            yield "is kept for the node (devices.keep); take it out of the device plugin's selection"
        if facts.address in used:
            yield f"is the node's own: {used[facts.address]}; take it out of the device plugin's selection"
        if facts.virtual:
            yield (
                f"has {len(facts.virtual)} VFs, which it would take along; grant VFs, or remove them: echo 0 > "
                f"{FUNCTIONS}/{facts.address}/sriov_numvfs"
            )
        if facts.group is None:
            yield self._no_group()
            return
        if not facts.is_vfio and not self._rules.bind:
            yield (
                f"is at {_driver(facts)}, not at vfio-pci; bind it (driverctl set-override {facts.address} vfio-pci), or set "
                "devices.bind"
            )
        yield from self._neighbours(facts, facts.group, together)
        yield from self._group_node(facts.group) if facts.is_vfio else ()

    def _device(
        self, device: Passthrough, together: Collection[PciAddress], used: Mapping[PciAddress, str]
    ) -> Iterator[str]:
        if isinstance(device, PciFunction):
            facts = self._bus.function(device.address)
            if facts is None:
                yield "is not there: it was unplugged, or its VFs were removed; bring it back, or delete the pod"
            else:
                yield from self.function_faults(facts, used, together)
        elif isinstance(device, MediatedDevice):
            yield from self._mdev(device.uuid)
        elif isinstance(device, UsbDevice):
            yield from self._usb(device)
        else:
            yield from self._vdpa(device)

    def _no_group(self) -> str:
        if not self._bus.has_groups():
            return f"has no IOMMU group: {NO_IOMMU}"
        return (
            "has no IOMMU group although others have one: its bus is outside the IOMMU; grant a device in another slot"
        )

    def _neighbours(self, facts: PciFacts, group: int, together: Collection[PciAddress]) -> Iterator[str]:
        """VFIO gives a group whole: its other members must be idle, at VFIO, or in the same VM."""
        for address in addresses_of(self._bus.members(group)):
            if address == facts.address or (address in together and self._rules.bind):
                continue
            other = self._bus.function(address)
            if other is not None and not other.is_idle and not other.is_vfio:
                yield (
                    f"shares IOMMU group {group} with {address}, which is at {_driver(other)}; bind that to vfio-pci or "
                    f"unbind it (echo {address} > {FUNCTIONS}/{address}/driver/unbind), or grant a device with a group of "
                    "its own"
                )

    def _group_node(self, group: int) -> Iterator[str]:
        if self._files.text(f"{GROUPS}/{group}/name") == "vfio-noiommu":
            yield f"is at VFIO without an IOMMU, which QEMU refuses: {NO_IOMMU}"
            return
        for path in ("/dev/vfio/vfio", f"/dev/vfio/{group}"):
            if self._files.node(path).kind is not NodeKind.CHARACTER:
                yield f"cannot be opened: {path} is not there; modprobe vfio-pci, and look whether udev runs"

    def _mdev(self, uuid: str) -> Iterator[str]:
        if not self._bus.mdev_exists(uuid):
            yield "is not there; look whether the node was restarted after it was made, then delete the pod"
            return
        group = self._bus.mdev_group(uuid)
        if group is None:
            yield "has no IOMMU group; look whether vfio_mdev is loaded: modprobe vfio_mdev"
        else:
            yield from self._group_node(group)

    def _usb(self, device: UsbDevice) -> Iterator[str]:
        if self._files.node(f"/dev/bus/usb/{device.bus:03}/{device.device:03}").kind is not NodeKind.CHARACTER:
            yield "is not there: it was unplugged, and gets another number when it comes back; delete the pod"
        for name in self._files.names(_USB):
            place = tuple(self._files.text(f"{_USB}/{name}/{number}") for number in ("busnum", "devnum"))
            is_hub = self._files.text(f"{_USB}/{name}/bDeviceClass") == _HUB
            if place == (str(device.bus), str(device.device)) and is_hub:
                yield "is a USB hub, which no VM can have; grant a device behind it"

    def _vdpa(self, device: VdpaDevice) -> Iterator[str]:
        if self._files.node(device.path).kind is not NodeKind.CHARACTER:
            yield "is not there; modprobe vhost_vdpa, or delete the pod if the device was removed"

    def _memory(self, guest_memory: int) -> Iterator[str]:
        limit = self._rules.lockable() if guest_memory else None
        if limit is not None and guest_memory + EXTRA > limit:
            yield (
                f"QEMU has to lock the guest's memory, {_mib(guest_memory)} MiB and {_mib(EXTRA)} more, and may lock "
                f"{_mib(limit)} MiB; set LimitMEMLOCK=infinity in the unit of libvirt's daemon (the embedded driver: of "
                "virtshim)"
            )


def _words(device: Passthrough) -> str:
    what = {PciFunction: "PCI function", MediatedDevice: "mediated device", UsbDevice: "USB device", VdpaDevice: ""}
    place = device.claim.partition(":")[2]
    return " ".join(
        part for part in (what[type(device)], place, f"({device.resource})" if device.resource else "") if part
    )


def _driver(facts: PciFacts) -> str:
    return f"the driver {facts.driver}" if facts.driver else "no driver"


def _mib(size: int) -> int:
    return size >> 20
