"""Checks whether devices can be given to a VM now. Every fault says what is wrong and what to do, because libvirt's and
QEMU's own errors come late and say little: `group 5 is not viable`, `failed to open /dev/vfio/9`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.devices.host_files import HostFiles, NodeKind
from virtshim.devices.host_use import usb_used_by_host, used_by_host
from virtshim.devices.pci import FUNCTIONS, PciBus, PciFacts, addresses_of
from virtshim.devices.values import (
    UNRESPONSIVE,
    UNRESPONSIVE_REMEDY,
    DeviceCondition,
    MediatedDevice,
    Passthrough,
    PciAddress,
    PciFunction,
    UsbDevice,
    VdpaDevice,
)

# How much memory QEMU may lock: VFIO and vDPA pin all of a guest's memory. libvirt raises the limit for each VM, if it
# may.

# On x86 libvirt asks for this in addition to the guest's memory, for the devices themselves.
EXTRA: Final = 1 << 30

_SYS_RESOURCE: Final = 1 << 24
_LIMIT: Final = re.compile(r"^Max locked memory\s+\S+\s+(\S+)", re.MULTILINE)
_CAPABILITIES: Final = re.compile(r"^CapEff:\s*([0-9a-f]+)$", re.MULTILINE)
_DAEMONS: Final = ("/run/virtqemud.pid", "/run/libvirtd.pid")


def times_locked(devices: Sequence[Passthrough]) -> int:
    """How many times the guest's memory counts against the limit of locked memory: once for VFIO, and once for each
    vDPA device. libvirt requires the same. USB devices do not pin memory. Pure."""
    alone = sum(isinstance(device, VdpaDevice) for device in devices)
    return alone + any(isinstance(device, PciFunction | MediatedDevice) for device in devices)


def lockable(files: HostFiles, uri: str) -> int | None:
    """How many bytes a QEMU of this libvirt may lock; None for no limit, or if it cannot be found out."""
    return next((_of(files, pid) for pid in _processes(files, uri)), None)


def _processes(files: HostFiles, uri: str) -> Sequence[str]:
    """The process that starts QEMU: libvirt's daemon, or virtshim itself with the embedded driver."""
    if uri.startswith("qemu:///embed"):
        return ["self"]
    found = (files.text(path) for path in _DAEMONS)
    return [pid for pid in found if pid.isdecimal() and files.exists(f"/proc/{pid}/limits")]


def _of(files: HostFiles, pid: str) -> int | None:
    capabilities = _CAPABILITIES.search(files.text(f"/proc/{pid}/status"))
    limit = _LIMIT.search(files.text(f"/proc/{pid}/limits"))
    may_raise = capabilities is not None and bool(int(capabilities[1], 16) & _SYS_RESOURCE)
    return int(limit[1]) if limit is not None and limit[1].isdecimal() and not may_raise else None


_USB: Final = "/sys/bus/usb/devices"
_HUB: Final = "09"
IOMMU_ON: Final = (
    "enable VT-d or AMD-Vi in the BIOS, boot the kernel with intel_iommu=on (AMD needs no option), and look for DMAR or "
    "AMD-Vi in dmesg"
)
_SELECTION: Final = "remove it from the device plugin's selection"


@dataclass(frozen=True, slots=True)
class Fault:
    """`brief`: two words for a table. `text`: follows the device's name. `remedy`: what to do."""

    brief: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class AttachRules:
    """`bind`: whether a function of another driver is bound to VFIO before it is attached. `keep`: functions that no VM
    gets. `lockable`: bytes of memory that QEMU may lock, read only when needed; None for no limit."""

    bind: bool
    keep: Collection[PciAddress]
    lockable: Callable[[], int | None]


class AttachChecker:
    def __init__(self, files: HostFiles, rules: AttachRules) -> None:
        self._files = files
        self._bus = PciBus(files)
        self._rules = rules

    def faults(self, devices: Sequence[Passthrough], guest_memory: int) -> list[str]:
        """The faults of attaching these devices together; [] if there are none."""
        faults: list[str] = []
        together = {device.address for device in devices if isinstance(device, PciFunction)}
        used = used_by_host(self._files) if together else {}
        for device in devices:
            words = _words(device)
            faults += (f"{words} {fault}" for fault in self._device(device, together, used))
        return [*faults, *self._memory(guest_memory * times_locked(devices))]

    def function_faults(
        self, facts: PciFacts, used: Mapping[PciAddress, str], together: Collection[PciAddress] = ()
    ) -> Iterator[Fault]:
        """The faults of one function. `used`: functions that the node uses. `together`: functions that the same VM
        gets."""
        where = f"{FUNCTIONS}/{facts.address}"
        if facts.is_bridge:
            yield Fault("a bridge", "is a PCI bridge, which cannot be passed to a VM", "grant what is behind it")
            return
        if not facts.answers:
            yield Fault("no answer", UNRESPONSIVE, UNRESPONSIVE_REMEDY.format(address=facts.address))
            return
        if facts.address in self._rules.keep:
            yield Fault("kept", "is reserved for the node (devices.keep)", _SELECTION)
        if facts.address in used:
            yield Fault("in use", f"is used by the node: {used[facts.address]}", _SELECTION)
        if facts.virtual:
            text = f"has VFs ({len(facts.virtual)}), which the VM would get too"
            yield Fault("has VFs", text, f"grant VFs, or remove them: echo 0 > {where}/sriov_numvfs")
        if facts.parts:
            text = f"has {', '.join(facts.parts)} created from it, which the VM would get too"
            yield Fault("in parts", text, "grant those, or remove them")
        if facts.group is None:
            yield self._no_group()
            return
        if not facts.is_vfio and not self._rules.bind:
            remedy = f"bind it (driverctl set-override {facts.address} vfio-pci), or set devices.bind"
            yield Fault("not bound", f"is bound to {_driver(facts)}, not vfio-pci", remedy)
        yield from self._neighbours(facts, facts.group, together)
        yield from self._group_node(facts.group) if facts.is_vfio else ()

    def _device(
        self, device: Passthrough, together: Collection[PciAddress], used: Mapping[PciAddress, str]
    ) -> Iterator[Fault]:
        if isinstance(device, PciFunction):
            facts = self._bus.function(device.address)
            if facts is None:
                text = "does not exist: it was unplugged, or its VFs were removed"
                yield Fault("gone", text, "bring it back, or delete the pod")
            else:
                yield from self.function_faults(facts, used, together)
        elif isinstance(device, MediatedDevice):
            yield from self._mdev(device.uuid)
        elif isinstance(device, UsbDevice):
            yield from self._usb(device)
        else:
            yield from self._vdpa(device)

    def _no_group(self) -> Fault:
        if not self._bus.groups():
            return Fault("no IOMMU", "has no IOMMU group: the IOMMU is off", IOMMU_ON)
        text = "has no IOMMU group although others do: its bus is outside the IOMMU"
        return Fault("no IOMMU", text, "grant a device in another slot")

    def _neighbours(self, facts: PciFacts, group: int, together: Collection[PciAddress]) -> Iterator[Fault]:
        """VFIO gives a group as a whole: each other member must be idle, bound to VFIO, or in the same VM."""
        for address in addresses_of(self._bus.members(group)):
            if address == facts.address or (address in together and self._rules.bind):
                continue
            other = self._bus.function(address)
            if other is not None and not other.is_idle and not other.is_vfio:
                yield Fault(
                    "shared group",
                    f"shares IOMMU group {group} with {address}, which is bound to {_driver(other)}",
                    f"bind that to vfio-pci or unbind it (echo {address} > {FUNCTIONS}/{address}/driver/unbind), or grant a "
                    "device with a group of its own",
                )

    def _group_node(self, group: int) -> Iterator[Fault]:
        if self._bus.is_unguarded(group):
            yield Fault("no IOMMU", "is bound to VFIO without an IOMMU, which QEMU refuses", IOMMU_ON)
            return
        for path in ("/dev/vfio/vfio", f"/dev/vfio/{group}"):
            if self._files.node(path).kind is not NodeKind.CHARACTER:
                yield Fault(
                    "no node", f"cannot be opened: {path} does not exist", "modprobe vfio-pci, and check that udev runs"
                )

    def _mdev(self, uuid: str) -> Iterator[Fault]:
        if not self._bus.mdev_exists(uuid):
            yield Fault(
                "gone",
                "does not exist",
                "check whether the node was rebooted after it was created, then delete the pod",
            )
            return
        group = self._bus.mdev_group(uuid)
        if group is None:
            yield Fault("no IOMMU", "has no IOMMU group", "modprobe vfio_mdev, if the kernel has it")
        else:
            yield from self._group_node(group)

    def _usb(self, device: UsbDevice) -> Iterator[Fault]:
        if self._files.node(f"/dev/bus/usb/{device.bus:03}/{device.device:03}").kind is not NodeKind.CHARACTER:
            text = "does not exist: it was unplugged, and gets another number when it returns"
            yield Fault("gone", text, "delete the pod")
        for name in self._files.names(_USB):
            place = tuple(self._files.text(f"{_USB}/{name}/{number}") for number in ("busnum", "devnum"))
            is_hub = self._files.text(f"{_USB}/{name}/bDeviceClass") == _HUB
            if place == (str(device.bus), str(device.device)) and is_hub:
                yield Fault("a hub", "is a USB hub, which cannot be passed to a VM", "grant a device behind it")
        used = usb_used_by_host(self._files).get((device.bus, device.device))
        if used is not None:
            yield Fault("in use", f"is used by the node: {used}", _SELECTION)

    def _vdpa(self, device: VdpaDevice) -> Iterator[Fault]:
        if self._files.node(device.path).kind is not NodeKind.CHARACTER:
            yield Fault("gone", "does not exist", "modprobe vhost_vdpa, or delete the pod if the device was removed")

    def _memory(self, locked: int) -> Iterator[str]:
        limit = self._rules.lockable() if locked else None
        if limit is not None and locked + EXTRA > limit:
            yield (
                f"QEMU has to lock the guest's memory, {_mib(locked)} MiB and {_mib(EXTRA)} more, but may lock only "
                f"{_mib(limit)} MiB; set LimitMEMLOCK=infinity in the unit of libvirt's daemon (the embedded driver: of "
                "virtshim)"
            )


def condition_faults(condition: DeviceCondition | None) -> Iterator[Fault]:
    """A failed reset, if there was one. It is not among `function_faults`, because giving the function to a VM resets
    it first."""
    if condition is not None and condition.fault:
        yield Fault("reset failed", condition.fault, condition.remedy)


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
