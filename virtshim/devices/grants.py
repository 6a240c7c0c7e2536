"""What a granted device node means to a VM, judged by stat and its path. Names of resources do not matter, so that a
pod with a VF and a block volume gets both."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from virtshim.devices.host_files import HostFiles, NodeKind
from virtshim.devices.host_use import use_of_block
from virtshim.devices.pci import is_uuid, last_address
from virtshim.devices.values import (
    BlockDevice,
    CriDevice,
    MediatedDevice,
    Passthrough,
    PciAddress,
    PciFunction,
    UsbDevice,
    VdpaDevice,
)
from virtshim.model.errors import InvalidRequest

# Environment variables in which device plugins name what they granted. They are only hints, because a pod's author can
# write them too. Pure.

# The variables of sriov-network-device-plugin (its *_INFO holds JSON for programs), of KubeVirt's and NVIDIA's plugins,
# and of Intel's QAT plugin, whose numbers mean nothing.
_PCI: Final = re.compile(r"PCIDEVICE_(?!.*_INFO$).+|PCI_RESOURCE_.+|QAT[0-9]+", re.DOTALL)
_MDEV: Final = re.compile(r"MDEV_PCI_RESOURCE_.+", re.DOTALL)
_USB: Final = re.compile(r"USB_RESOURCE_.+", re.DOTALL)
_USB_PLACE: Final = re.compile(r"([0-9]{1,3}):([0-9]{1,3})", re.ASCII)

# Of a variable's name in logs and messages; a name may be as long as a pod.
_LONGEST_NAME: Final = 200

Hinted: TypeAlias = PciFunction | MediatedDevice | UsbDevice


@dataclass(frozen=True, slots=True)
class Hint:
    """`text`: what the variable says about this device. `spec`: path of the CDI specification that sets the variable;
    "" if the container sets it, so that the pod's author may have written it."""

    variable: str
    text: str
    device: Hinted
    spec: str = ""


def hints(variables: Iterable[tuple[str, str, str]]) -> list[Hint]:
    """`variables`: (name, value, specification). A comma-separated list gives one hint for each device. Values that are
    not addresses, such as the number of a subfunction, are left out."""
    return list(dict.fromkeys(hint for name, value, spec in variables for hint in _hints(name, value, spec)))


def _hints(name: str, value: str, spec: str) -> Iterator[Hint]:
    for kind, read in ((_PCI, _function), (_MDEV, _mdev), (_USB, _hints_usb)):
        if kind.fullmatch(name) is None:
            continue
        for text in (part.strip() for part in value.split(",")):
            device = read(text)
            if device is not None:
                yield Hint(name[:_LONGEST_NAME], text, device, spec)


def _function(text: str) -> PciFunction | None:
    try:
        return PciFunction(PciAddress.parse(text))
    except InvalidRequest:
        return None


def _mdev(text: str) -> MediatedDevice | None:
    return MediatedDevice(text.lower()) if is_uuid(text.lower()) else None


def _hints_usb(text: str) -> UsbDevice | None:
    match = _USB_PLACE.fullmatch(text)
    return UsbDevice(int(match[1]), int(match[2])) if match else None


# What kubelet granted, and what the VM gets of it. Hints choose among the granted devices; they never add one. Pure.


@dataclass(frozen=True, slots=True)
class Authority:
    """`groups`: the IOMMU groups of granted device nodes; for each group, the functions that can be passed to a VM. `named`:
    functions that kubelet or CDI names one by one; of their IOMMU groups, the VM gets only these. `unconditional`, `if_hinted`:
    functions that are named without a device node and are bound to a kernel driver. The VM always gets the `unconditional`
    functions. It gets an `if_hinted` function only if a hint names it too. `used`: functions that the VM gets in another form,
    as a vDPA device."""

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
    """In a group with several functions: those that kubelet, CDI or a hint names, otherwise all. A hint adds nothing to
    the grant."""
    asked = {hint.device.address for hint in hinted if isinstance(hint.device, PciFunction)}
    addresses = set(authority.unconditional | (authority.if_hinted & asked))
    for functions in authority.groups.values():
        addresses.update([one for one in functions if one in authority.named | asked] or functions)
    devices: list[Passthrough] = [PciFunction(address) for address in sorted(addresses - authority.used)]
    devices += (MediatedDevice(uuid) for uuid in sorted(authority.mdevs))
    devices += sorted(authority.others, key=lambda device: device.claim)
    return devices


def forged(authority: Authority, hinted: Iterable[Hint]) -> list[Hint]:
    """The hints that name devices without a grant."""
    return [hint for hint in hinted if not authority.grants(hint.device)]


def in_order(devices: Iterable[Passthrough]) -> tuple[Passthrough, ...]:
    """Sorted by resource, then by address: a recreated pod with the same devices has them at the same places."""

    def key(device: Passthrough) -> tuple[str, str, PciAddress, str]:
        address = device.address if isinstance(device, PciFunction) else PciAddress(0, 0, 0, 0)
        return (device.resource, type(device).__name__, address, device.claim)

    return tuple(sorted(devices, key=key))


@dataclass(frozen=True, slots=True)
class NoDevice:
    """Not a device of its own: the VFIO container, or what every VM has anyway."""


@dataclass(frozen=True, slots=True)
class VfioGroup:
    """A whole IOMMU group."""

    number: int


@dataclass(frozen=True, slots=True)
class VfioFunction:
    """The function behind a /dev/vfio/devices node."""

    address: PciAddress


@dataclass(frozen=True, slots=True)
class VfioMdev:
    """The mediated device behind a /dev/vfio/devices node."""

    uuid: str


@dataclass(frozen=True, slots=True)
class VfioDirectory:
    """All of /dev/vfio, as NVIDIA's plugin for vGPUs grants it. kubelet's list says which mediated device is meant."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """A node that cannot be passed to a VM. `why` ends with the remedy."""

    why: str


Meaning: TypeAlias = (
    BlockDevice | NoDevice | VfioGroup | VfioFunction | VfioMdev | VfioDirectory | UsbDevice | VdpaDevice | Unusable
)

_Read: TypeAlias = Callable[[re.Match[str], CriDevice, HostFiles], Meaning]


def classify(device: CriDevice, files: HostFiles) -> Meaning:
    meaning = _meaning(device, files)
    rights = device.permissions or "rwm"
    wanted = "r" if isinstance(meaning, BlockDevice) else "rw"
    if isinstance(meaning, NoDevice | Unusable) or (rights != "none" and set(wanted) <= set(rights)):
        return meaning
    return Unusable(f"it is granted with permissions {rights}, but a VM needs {wanted}; correct the device plugin")


def _meaning(device: CriDevice, files: HostFiles) -> Meaning:
    path = os.path.normpath(device.host_path) if device.host_path.startswith("/") else device.host_path
    found = files.node(path)
    if found.kind is NodeKind.MISSING:
        return Unusable("it does not exist; check that the device's driver still runs, then delete the pod")
    if found.kind is NodeKind.BLOCK:
        # The path is a link of this pod's own; another pod has another link to the same device.
        readonly = "w" not in (device.permissions or "rwm")
        number = f"{found.major}:{found.minor}"
        block = BlockDevice(files.target(path) or path, device.container_path or path, readonly, number)
        use = "" if block.readonly else use_of_block(files, found.major, found.minor)
        return Unusable(f"{use}, and two writers would corrupt it; grant another one") if use else block
    if found.kind is NodeKind.DIRECTORY:
        return VfioDirectory() if path == "/dev/vfio" else Unusable(_NOT_A_NODE.format(found.kind.value))
    if found.kind is not NodeKind.CHARACTER:
        return Unusable(_NOT_A_NODE.format(found.kind.value))
    for pattern, read in _TABLE:
        match = pattern.fullmatch(path)
        if match is not None:
            return read(match, device, files)
    return Unusable(_UNKNOWN)


_NOT_A_NODE: Final = "it is a {}, not a device node; correct the device plugin"
_UNKNOWN: Final = (
    "it is a device for containers, not for VMs; a VM gets PCI functions bound to vfio-pci, mediated devices, USB devices, "
    "vhost-vdpa and block volumes: set the device plugin to one of these, or run the pod as a container"
)
_REFUSALS: Final = {
    r"/dev/vfio/noiommu-\d+": "without an IOMMU the guest could reach all of the node's memory, so no VM gets it; enable the "
    "IOMMU (BIOS: VT-d or AMD-Vi; kernel: intel_iommu=on)",
    r"/dev/uio\d+": "no VM can use UIO; set the device plugin to bind vfio-pci (`dpdkDriver: vfio-pci` for QAT)",
    r"/dev/infiniband/.+": "a VM gets the whole VF, not the node's RDMA device; bind the VF to vfio-pci and set the device "
    "plugin's isRdma to false",
    r"/dev/nvidia.*": "it belongs to NVIDIA's plugin for containers; use NVIDIA's kubevirt-gpu-device-plugin, which grants GPUs "
    "at vfio-pci and vGPUs",
    r"/dev/(?:dri/.+|kfd)": "it is shared by the node's own driver; grant the GPU, or a VF of it, at vfio-pci",
}
_HELPERS: Final = r"/dev/(?:vfio/vfio|iommu|kvm|net/tun|vhost-net|vhost-vsock)"


def _refusal(why: str) -> _Read:
    return lambda _match, _device, _files: Unusable(why)


def _cdev(match: re.Match[str], device: CriDevice, files: HostFiles) -> Meaning:
    """Finds the function by the node's class, otherwise by its number, because a plugin may use another name for the
    node."""
    node = files.node(device.host_path)
    for link in (f"/sys/class/vfio-dev/{match[1]}/device", f"/sys/dev/char/{node.major}:{node.minor}"):
        real = files.target(link)
        parts = [part for part in real.split("/") if is_uuid(part)]
        if parts:
            return VfioMdev(parts[-1])
        address = last_address(real)
        if address is not None:
            return VfioFunction(address)
    return Unusable("sysfs has no device behind it; check that the device is still bound to vfio-pci")


def _classify_usb(match: re.Match[str], _device: CriDevice, _files: HostFiles) -> Meaning:
    return UsbDevice(int(match[1]), int(match[2]))


_TABLE: Final[tuple[tuple[re.Pattern[str], _Read], ...]] = (
    (re.compile(_HELPERS), lambda _match, _device, _files: NoDevice()),
    (re.compile(r"/dev/vfio/([0-9]+)"), lambda match, _device, _files: VfioGroup(int(match[1]))),
    (re.compile(r"/dev/vfio/devices/(vfio[0-9]+)"), _cdev),
    (re.compile(r"/dev/bus/usb/([0-9]{3})/([0-9]{3})"), _classify_usb),
    (re.compile(r"/dev/vhost-vdpa-[0-9]+"), lambda match, _device, _files: VdpaDevice(match[0])),
    *((re.compile(pattern), _refusal(why)) for pattern, why in _REFUSALS.items()),
)
