"""Which PCI devices of this node a VM can use: takes facts, returns the table and the findings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.devices.attachable import EXTRA, IOMMU_ON, Fault
from virtshim.devices.pci import PciFacts
from virtshim.preflight.finding import Finding, error, ok, warning

HEAD: Final = ("ADDRESS", "DEVICE", "ID", "DRIVER", "GROUP", "NUMA", "VFS", "FOR A VM", "HELD BY")

# The PCI classes that people pass to VMs, or expect in the table.
_CLASSES: Final = {
    0x0100: "SCSI",
    0x0104: "RAID",
    0x0106: "SATA",
    0x0107: "SAS",
    0x0108: "NVMe",
    0x0180: "storage",
    0x0200: "network",
    0x0207: "InfiniBand",
    0x0280: "network",
    0x0300: "GPU",
    0x0302: "GPU",
    0x0380: "display",
    0x0403: "audio",
    0x0680: "bridge",
    0x0B40: "co-processor",
    0x0C03: "USB",
    0x1200: "accelerator",
}
_SHORT: Final = 12
# These faults appear in the table, but need no repair.
_USUAL: Final = frozenset({"has VFs", "in use", "kept"})


@dataclass(frozen=True, slots=True)
class ExaminedFunction:
    """A PCI function, the faults that prevent its use, and the container that holds it ("" for none). `place`: which VF of which
    network card it is; `vlan`: its VLAN there. Both are "" for other functions."""

    facts: PciFacts
    faults: tuple[Fault, ...] = ()
    holder: str = ""
    place: str = ""
    vlan: str = ""


@dataclass(frozen=True, slots=True)
class HostDeviceSupport:
    """What the node offers for host devices. `lockable`: bytes that QEMU may lock, None for no limit. `kubelet`: kubelet's
    socket, "" if kubelet must not be asked. `specifications`: number of CDI specifications; `invalid`: path and fault of
    those that cannot be used. `lost`: claims of containers on devices that no longer exist."""

    groups: int
    has_vfio: bool
    without_iommu: bool
    lockable: int | None
    kubelet: str
    kubelet_is_there: bool
    cdi_dirs: tuple[str, ...]
    specifications: int
    invalid: tuple[str, ...]
    lost: Mapping[str, str]


def rows(candidates: Sequence[ExaminedFunction]) -> list[tuple[str, ...]]:
    """The cells for the columns of HEAD; "-" for an empty cell."""
    return [
        (
            str(one.facts.address),
            _device(one.facts),
            f"{one.facts.vendor:04x}:{one.facts.device:04x}",
            one.facts.driver or "-",
            _or_dash(one.facts.group),
            _or_dash(one.facts.node),
            _virtual(one),
            _verdict(one),
            one.holder[:_SHORT] or "-",
        )
        for one in candidates
    ]


def findings(candidates: Sequence[ExaminedFunction], support: HostDeviceSupport) -> list[Finding]:
    """An error means that VMs cannot use any device."""
    found = [_iommu(support), _vfio(support), _memory(support), _kubelet(support), _cdi(support)]
    # Without an IOMMU every function has the same fault, so one finding is enough.
    told = candidates if support.groups else ()
    found += [
        warning(str(one.facts.address), fault.text, fault.remedy)
        for one in told
        for fault in one.faults
        if fault.brief not in _USUAL
    ]
    found += [
        warning("claims", f"container {holder[:_SHORT]} holds {claim}, which no longer exists", "delete its pod")
        for claim, holder in sorted(support.lost.items())
    ]
    return found


def _iommu(support: HostDeviceSupport) -> Finding:
    if support.without_iommu:
        text = "vfio.enable_unsafe_noiommu_mode is set, and VMs cannot use the devices that it creates"
        return (warning if support.groups else error)("IOMMU", text, f"unset it (/etc/modprobe.d); {IOMMU_ON}")
    if support.groups:
        return ok("IOMMU", f"on, {support.groups} groups")
    return error("IOMMU", "off: VMs cannot use PCI devices", IOMMU_ON)


def _vfio(support: HostDeviceSupport) -> Finding:
    if support.has_vfio:
        return ok("VFIO", "/dev/vfio/vfio exists")
    return warning(
        "VFIO",
        "/dev/vfio/vfio is missing",
        "modprobe vfio-pci; to load it at every boot, add it to /etc/modules-load.d/vfio.conf",
    )


def _memory(support: HostDeviceSupport) -> Finding:
    if support.lockable is None:
        return ok("locked memory", "QEMU may lock all of a guest's memory")
    room = max(0, support.lockable - EXTRA) >> 20
    text = f"QEMU may lock {support.lockable >> 20} MiB: a guest with a device can have at most {room} MiB"
    return warning("locked memory", text, "set LimitMEMLOCK=infinity in the unit of libvirt's daemon and restart it")


def _kubelet(support: HostDeviceSupport) -> Finding:
    if not support.kubelet:
        text = (
            "virtshim does not ask kubelet for pods' containers and granted devices: a pod with two containers is not refused as "
            "a whole, and VMs get no VF at a kernel driver and no vGPU of NVIDIA's plugin"
        )
        return warning("kubelet", text, "set devices.pod_resources_socket")
    if support.kubelet_is_there:
        return ok("kubelet", f"reports pods' containers and granted devices on {support.kubelet}")
    return warning("kubelet", f"{support.kubelet} is missing", "start kubelet, or set devices.pod_resources_socket")


def _cdi(support: HostDeviceSupport) -> Finding:
    if support.invalid:
        return warning(
            "CDI", f"specifications that cannot be used: {'; '.join(support.invalid)}", "correct or remove them"
        )
    return ok("CDI", f"{support.specifications} specifications in {', '.join(support.cdi_dirs) or 'no directory'}")


def _verdict(one: ExaminedFunction) -> str:
    if one.faults:
        return f"no: {one.faults[0].brief}"
    return "yes" if one.facts.is_vfio else "yes, bound on use"


def _virtual(one: ExaminedFunction) -> str:
    facts = one.facts
    if one.place:
        return one.place + (f", VLAN {one.vlan}" if one.vlan else "")
    if facts.physical is not None:
        return f"of {facts.physical}"
    return f"{len(facts.virtual)} of {facts.virtual_total}" if facts.virtual_total or facts.virtual else "-"


def _device(facts: PciFacts) -> str:
    kind = _CLASSES.get(facts.class_code >> 8, f"class {facts.class_code >> 8:04x}")
    return f"{kind} {','.join(facts.interfaces)}".strip()


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)
