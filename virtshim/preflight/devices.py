"""Which PCI devices of this node a VM could have: facts in, table and findings out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.devices.attachable import EXTRA, IOMMU_ON, Fault
from virtshim.devices.pci import PciFacts
from virtshim.preflight.finding import Finding, error, ok, warning

HEAD: Final = ("ADDRESS", "DEVICE", "ID", "DRIVER", "GROUP", "NUMA", "VFS", "FOR A VM", "HELD BY")

# The PCI classes that people pass to VMs, or look for in vain.
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
# They stand in the table, and are nothing to repair.
_USUAL: Final = frozenset({"has VFs", "in use", "kept"})


@dataclass(frozen=True, slots=True)
class ExaminedFunction:
    """A function with what stands in its way, and the container that has it ("" for none). `place`: which VF of which network
    card it is, `vlan`: its VLAN there; "" for others."""

    facts: PciFacts
    faults: tuple[Fault, ...] = ()
    holder: str = ""
    place: str = ""
    vlan: str = ""


@dataclass(frozen=True, slots=True)
class HostDeviceSupport:
    """`lockable`: bytes, None for no limit. `kubelet`: its socket, "" if it is not to be asked. `specifications`: how many
    CDI specifications are there, `invalid`: path and reason of those that cannot be used. `lost`: claims of containers on
    devices that are gone."""

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
    """Cells as in HEAD; "-" where there is nothing to say."""
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
    """Errors: no VM can have any device."""
    found = [_iommu(support), _vfio(support), _memory(support), _kubelet(support), _cdi(support)]
    # Without any IOMMU all of them say what one finding says.
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
        text = "vfio.enable_unsafe_noiommu_mode is set, and no VM can use the devices it makes"
        return (warning if support.groups else error)("IOMMU", text, f"unset it (/etc/modprobe.d); {IOMMU_ON}")
    if support.groups:
        return ok("IOMMU", f"on, {support.groups} groups")
    return error("IOMMU", "off: no VM can have a PCI device", IOMMU_ON)


def _vfio(support: HostDeviceSupport) -> Finding:
    if support.has_vfio:
        return ok("VFIO", "/dev/vfio/vfio is there")
    return warning(
        "VFIO", "/dev/vfio/vfio is missing", "modprobe vfio-pci; for every start: /etc/modules-load.d/vfio.conf"
    )


def _memory(support: HostDeviceSupport) -> Finding:
    if support.lockable is None:
        return ok("locked memory", "QEMU may lock as much as a guest has")
    room = max(0, support.lockable - EXTRA) >> 20
    text = f"QEMU may lock {support.lockable >> 20} MiB: a guest with a device can have {room} MiB at most"
    return warning("locked memory", text, "LimitMEMLOCK=infinity in the unit of libvirt's daemon, then restart it")


def _kubelet(support: HostDeviceSupport) -> Finding:
    if not support.kubelet:
        text = (
            "not asked which containers pods have, and what it granted: a pod with two containers is not refused as a whole, no "
            "VF at a kernel driver, no vGPU of NVIDIA's plugin"
        )
        return warning("kubelet", text, "set devices.pod_resources_socket")
    if support.kubelet_is_there:
        return ok("kubelet", f"reports pods' containers and what it granted on {support.kubelet}")
    return warning("kubelet", f"{support.kubelet} is missing", "start kubelet, or set devices.pod_resources_socket")


def _cdi(support: HostDeviceSupport) -> Finding:
    if support.invalid:
        return warning("CDI", f"cannot be used: {'; '.join(support.invalid)}", "correct them or remove them")
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
