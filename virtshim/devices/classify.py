"""What a device node that kubelet granted means to a VM, by what stat says and where it is. Names of resources decide nothing:
a pod with a VF and a block volume gets both right."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from virtshim.devices.host_files import HostFiles, NodeKind
from virtshim.devices.host_use import use_of_block
from virtshim.devices.pci import is_uuid, last_address
from virtshim.domain.devices.granted import BlockDevice, CriDevice, PciAddress, UsbDevice, VdpaDevice


@dataclass(frozen=True, slots=True)
class NoDevice:
    """No device by itself: the VFIO container, or what every VM has anyway."""


@dataclass(frozen=True, slots=True)
class VfioGroup:
    """All of an IOMMU group."""

    number: int


@dataclass(frozen=True, slots=True)
class VfioFunction:
    """The one function behind a /dev/vfio/devices node."""

    address: PciAddress


@dataclass(frozen=True, slots=True)
class VfioMdev:
    """The one mediated device behind such a node."""

    uuid: str


@dataclass(frozen=True, slots=True)
class VfioDirectory:
    """All of /dev/vfio, as NVIDIA's plugin for vGPUs grants it: which mediated device is meant, kubelet's list says."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """It cannot be passed to a VM. `why` ends with the remedy."""

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
    return Unusable(f"it is granted with permissions {rights}, and a VM needs {wanted}; correct the device plugin")


def _meaning(device: CriDevice, files: HostFiles) -> Meaning:
    path = os.path.normpath(device.host_path) if device.host_path.startswith("/") else device.host_path
    found = files.node(path)
    if found.kind is NodeKind.MISSING:
        return Unusable("it is not there; check that the device's driver still runs, then delete the pod")
    if found.kind is NodeKind.BLOCK:
        # kubelet names it by a link of the pod's own; another pod has another link to the same device.
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
    r"/dev/vfio/noiommu-\d+": "without an IOMMU the guest could reach all of the node's memory, so no VM gets it; turn the "
    "IOMMU on (BIOS: VT-d or AMD-Vi; kernel: intel_iommu=on)",
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
    """Through the class, else through the node's number: a plugin may show it by another name."""
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


def _usb(match: re.Match[str], _device: CriDevice, _files: HostFiles) -> Meaning:
    return UsbDevice(int(match[1]), int(match[2]))


_TABLE: Final[tuple[tuple[re.Pattern[str], _Read], ...]] = (
    (re.compile(_HELPERS), lambda _match, _device, _files: NoDevice()),
    (re.compile(r"/dev/vfio/([0-9]+)"), lambda match, _device, _files: VfioGroup(int(match[1]))),
    (re.compile(r"/dev/vfio/devices/(vfio[0-9]+)"), _cdev),
    (re.compile(r"/dev/bus/usb/([0-9]{3})/([0-9]{3})"), _usb),
    (re.compile(r"/dev/vhost-vdpa-[0-9]+"), lambda match, _device, _files: VdpaDevice(match[0])),
    *((re.compile(pattern), _refusal(why)) for pattern, why in _REFUSALS.items()),
)
