"""VmSpec: what to boot, not how. The hypervisor adapter turns it into libvirt XML."""

from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass

from virtshim.domain.cgroup import CgroupLimits
from virtshim.domain.devices.granted import GrantedDevices
from virtshim.domain.ids import ContainerId, SandboxId
from virtshim.domain.image import DiskFormat


class DiskBus(enum.Enum):
    SCSI = "scsi"
    VIRTIO = "virtio"


class CpuModel(enum.Enum):
    """DEFAULT leaves the choice to the node; HOST_MODEL is libvirt's host-model; HOST_PASSTHROUGH needs KVM."""

    DEFAULT = ""
    HOST_MODEL = "host-model"
    HOST_PASSTHROUGH = "host-passthrough"


@dataclass(frozen=True, slots=True)
class Disk:
    """`path` is a file readable (and, unless `readonly`, writable) by the QEMU user. Disks are attached in list order:
    the first is the boot disk. `serial` shows in the guest below /dev/disk/by-id. `cdrom` is a read-only ISO."""

    path: str
    format: DiskFormat
    serial: str
    readonly: bool = False
    cdrom: bool = False


@dataclass(frozen=True, slots=True)
class VmSize:
    """What a VM has now and what it can have without a restart. `page_bytes`: its memory is of huge pages of that size;
    0: it is not. All 0: created by a version that did not record it."""

    vcpus: int = 0
    max_vcpus: int = 0
    memory_bytes: int = 0
    max_memory_bytes: int = 0
    page_bytes: int = 0


@dataclass(frozen=True, slots=True)
class VmSpec:
    """One virtual machine. `memory_bytes` is what the guest gets, `max_*` what it can be given while it runs (0: no more
    than that). `limits` and `cgroup_parent` are for libvirts that manage cgroups. `console_socket`, `console_log` and
    `agent_socket` are host paths: QEMU listens on the sockets and appends every console byte to the log. `exec_sockets` are
    listened on too, for what commands in the guest read and write. `fetch_key` and `tapmanager_socket` are for vmwrapper,
    which brings the NICs; an empty key means no network. `record`: `StateRecords.to_text` of its pod. `vnc_socket`: where
    QEMU's VNC server listens, in a directory of its own; "" for a VM without a video card. `granted`: devices of the host, in
    the order of their addresses in the guest (see `virtshim.domain.devices.guest_view`)."""

    uuid: uuid.UUID
    name: str
    container_id: ContainerId
    sandbox_id: SandboxId
    vcpus: int
    memory_bytes: int
    disk_bus: DiskBus
    disks: tuple[Disk, ...]
    console_socket: str
    console_log: str
    agent_socket: str
    max_vcpus: int = 0
    max_memory_bytes: int = 0
    page_bytes: int = 0
    limits: CgroupLimits = CgroupLimits()
    cgroup_parent: str = ""
    cpu_model: CpuModel = CpuModel.DEFAULT
    smbios_uuid: bool = False
    title: str = ""
    fetch_key: str = ""
    tapmanager_socket: str = ""
    exec_sockets: tuple[str, ...] = ()
    record: str = ""
    vnc_socket: str = ""
    granted: GrantedDevices = GrantedDevices()

    def __repr__(self) -> str:  # keeps the key out of logs
        return f"VmSpec({self.name!r}, uuid={self.uuid})"


class Power(enum.Enum):
    """ABSENT: no such domain. OFF: defined, not running. CRASHED: the guest panicked and is halted; QEMU remains."""

    ABSENT = "absent"
    OFF = "off"
    RUNNING = "running"
    PAUSED = "paused"
    SHUTTING_DOWN = "shutting-down"
    CRASHED = "crashed"


class OffReason(enum.Enum):
    """Why a domain is off, as libvirt reports it. CRASHED: QEMU ended unexpectedly (killed, or a fault of its own)."""

    UNKNOWN = "unknown"
    SHUTDOWN = "shutdown"
    DESTROYED = "destroyed"
    CRASHED = "crashed"
    FAILED = "failed"


class PauseReason(enum.Enum):
    """Why a domain is PAUSED. IO_ERROR: the host could not write its disk. GUEST: it put itself to sleep."""

    OTHER = "other"
    IO_ERROR = "io-error"
    GUEST = "guest"


@dataclass(frozen=True, slots=True)
class PowerState:
    """`reason` counts for what is off, `pause` for what is PAUSED."""

    power: Power
    reason: OffReason = OffReason.UNKNOWN
    pause: PauseReason = PauseReason.OTHER

    @property
    def is_on(self) -> bool:
        """True while a QEMU process exists for it."""
        return self.power in (Power.RUNNING, Power.PAUSED, Power.SHUTTING_DOWN, Power.CRASHED)

    @property
    def has_ended(self) -> bool:
        """True if its guest will not run on: it is off, or it panicked."""
        return not self.is_on or self.power is Power.CRASHED


@dataclass(frozen=True, slots=True)
class OwnedDomain:
    """A libvirt domain that carries our mark and this node's id."""

    uuid: uuid.UUID
    name: str
    container_id: ContainerId
    sandbox_id: SandboxId
    state: PowerState
