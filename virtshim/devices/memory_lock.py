"""How much memory QEMU may lock: VFIO and vDPA pin all of a guest's memory. libvirt raises the limit for each VM, if it may."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from virtshim.devices.host_files import HostFiles
from virtshim.domain.devices.granted import MediatedDevice, Passthrough, PciFunction, VdpaDevice

# libvirt on x86 asks for the guest's memory and this, for the devices' own.
EXTRA: Final = 1 << 30

_SYS_RESOURCE: Final = 1 << 24
_LIMIT: Final = re.compile(r"^Max locked memory\s+\S+\s+(\S+)", re.MULTILINE)
_CAPABILITIES: Final = re.compile(r"^CapEff:\s*([0-9a-f]+)$", re.MULTILINE)
_DAEMONS: Final = ("/run/virtqemud.pid", "/run/libvirtd.pid")


def times_locked(devices: Sequence[Passthrough]) -> int:
    """How often the kernel counts a guest's memory against the limit, and libvirt asks for it: once for VFIO, and once for each
    vDPA device. USB devices do not reach it. Pure."""
    alone = sum(isinstance(device, VdpaDevice) for device in devices)
    return alone + any(isinstance(device, PciFunction | MediatedDevice) for device in devices)


def lockable(files: HostFiles, uri: str) -> int | None:
    """Bytes that a QEMU of this libvirt may be allowed to lock; None for no limit, and where nobody can tell."""
    return next((_of(files, pid) for pid in _processes(files, uri)), None)


def _processes(files: HostFiles, uri: str) -> Sequence[str]:
    """The process that starts QEMU: libvirt's daemon, or ourselves with the embedded driver."""
    if uri.startswith("qemu:///embed"):
        return ["self"]
    found = (files.text(path) for path in _DAEMONS)
    return [pid for pid in found if pid.isdecimal() and files.exists(f"/proc/{pid}/limits")]


def _of(files: HostFiles, pid: str) -> int | None:
    capabilities = _CAPABILITIES.search(files.text(f"/proc/{pid}/status"))
    limit = _LIMIT.search(files.text(f"/proc/{pid}/limits"))
    may_raise = capabilities is not None and bool(int(capabilities[1], 16) & _SYS_RESOURCE)
    return int(limit[1]) if limit is not None and limit[1].isdecimal() and not may_raise else None
