"""VmSpec: what to boot, not how. The hypervisor adapter turns it into libvirt XML."""

from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass, field

from virtshim.devices.values import GrantedDevices
from virtshim.model.cgroup import CgroupLimits
from virtshim.model.hardware import FirmwareFiles, HardwareOptions
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.image import DiskFormat


class DiskBus(enum.Enum):
    SCSI = "scsi"
    VIRTIO = "virtio"
    SATA = "sata"


class CpuModel(enum.Enum):
    """DEFAULT leaves the choice to the node; HOST_MODEL is libvirt's host-model; HOST_PASSTHROUGH needs KVM; MAXIMUM
    has every feature that the node can offer; CUSTOM is one of libvirt's own models, by name."""

    DEFAULT = ""
    HOST_MODEL = "host-model"
    HOST_PASSTHROUGH = "host-passthrough"
    MAXIMUM = "maximum"
    CUSTOM = "custom"


@dataclass(frozen=True, slots=True)
class CpuDetails:
    """`name` of a CUSTOM model. `fallback`: libvirt may use a similar model instead. `features`: name and libvirt's
    policy."""

    name: str = ""
    fallback: bool = True
    features: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Backing:
    """A read-only file below a disk: what the disk does not have itself is read from this file."""

    path: str
    format: DiskFormat


@dataclass(frozen=True, slots=True)
class Disk:
    # A file readable (and, unless `readonly`, writable) by the QEMU user.
    path: str
    format: DiskFormat
    # Shows in the guest below /dev/disk/by-id.
    serial: str
    readonly: bool = False
    # The disk is a read-only ISO.
    cdrom: bool = False
    # The file below this disk, if there is one. The disk's own header is not trusted, because the VM can write it.
    backing: Backing | None = None
    # A block device of the host, which libvirt gives to QEMU's user while it runs.
    is_device: bool = False
    # The part of `path` that is the guest's disk: its beginning and length; both 0 if the whole file is the disk.
    data_at: int = 0
    data_bytes: int = 0


@dataclass(frozen=True, slots=True)
class VmSize:
    """What a VM has now and what it can have without a restart. All values are 0 in records of versions without these
    fields."""

    vcpus: int = 0
    # 0: no more than `vcpus`.
    max_vcpus: int = 0
    memory_bytes: int = 0
    # 0: no more than `memory_bytes`.
    max_memory_bytes: int = 0
    # The size of the huge pages that its memory consists of; 0 without huge pages.
    page_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NumaCell:
    """One NUMA node of the guest. `node` and `cpus`: the host's node, and the CPUs of that node on which the vCPUs
    run. `vcpus`: numbers of the vCPUs, including those that are plugged in later. `memory_bytes`: the most memory that
    this node may get."""

    node: int
    cpus: frozenset[int]
    vcpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceNumbers:
    """The place on the bus of each disk, block volume and NIC of a VmSpec. (): the places follow the order of the
    devices."""

    disks: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    nics: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VmSpec:
    """One virtual machine."""

    # --- who it is

    uuid: uuid.UUID
    # The domain's name in libvirt.
    name: str
    container_id: ContainerId
    sandbox_id: SandboxId

    # --- processors and memory

    size: VmSize

    # --- its disks

    disk_bus: DiskBus
    # In the order in which they are attached: the first is the boot disk.
    disks: tuple[Disk, ...]

    # --- its sockets: paths of the host that QEMU listens on

    console_socket: str
    # A file that QEMU appends every byte of the console to.
    console_log: str
    agent_socket: str
    # Of serial ports, for the input and output of commands in the guest.
    exec_sockets: tuple[str, ...] = ()
    # Of the VNC server, in a directory of its own; "" for a VM without a video card.
    vnc_socket: str = ""

    # Of the daemon that serves its volumes; "" for a VM without volumes.
    shares_socket: str = ""

    # --- who its QEMU is

    # The user id of this VM's QEMU, which no other VM has; 0: all VMs have the user that libvirt chooses.
    uid: int = 0

    # --- its processor, as the guest sees it

    cpu_model: CpuModel = CpuModel.DEFAULT
    cpu_details: CpuDetails = CpuDetails()

    # --- its cgroup, for libvirts that manage cgroups

    limits: CgroupLimits = CgroupLimits()
    cgroup_parent: str = ""

    # --- its NUMA nodes, which together have all vCPUs and memory; () if the guest is not told about NUMA

    cells: tuple[NumaCell, ...] = ()

    # --- what the guest recognizes the machine by

    # libvirt's name of the machine type, with its version; "" leaves it to libvirt.
    machine: str = ""
    numbers: DeviceNumbers = DeviceNumbers()
    hardware: HardwareOptions = HardwareOptions()
    # The file of UEFI's variables, which libvirt makes if it is missing; "" with a BIOS.
    nvram: str = ""
    # The firmware that the variables belong to; None lets libvirt choose it.
    firmware_files: FirmwareFiles | None = None
    # The root disk outlives this VM. The TPM's state stays too, for the next VM of the same UUID.
    keeps_tpm: bool = False
    # The TPM state of this UUID belongs to the VM's pod.
    owns_tpm: bool = False

    # --- its network, which vmwrapper brings

    # The secret with which vmwrapper gets the taps from tapmanager; "" for a VM without a network.
    fetch_key: str = field(default="", repr=False)
    tapmanager_socket: str = ""

    # --- what else it is given, and says of itself

    # Devices of the host, in the order of their addresses in the guest (see `virtshim.devices.guest_view`).
    granted: GrantedDevices = GrantedDevices()
    # Whether the guest sees `uuid` as its system's UUID.
    smbios_uuid: bool = False
    # Whether its firmware has a generation id, which tells the guest's kernel that its memory is a copy of another guest's.
    generation_id: bool = False
    # Shown in the guest's firmware, under each of the names that Ignition looks for; "" for none.
    ignition_file: str = ""
    # What the firmware starts in place of a boot loader, and its RAM disk; "" for none.
    kernel_file: str = ""
    initrd_file: str = ""
    # A CD-ROM on a bus that Windows' setup has a driver for; "" for none.
    sysprep_iso: str = ""
    # For people: namespace, pod and container.
    title: str = ""

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
    power: Power
    # Meaningful only while the domain is off.
    reason: OffReason = OffReason.UNKNOWN
    # Meaningful only while the domain is PAUSED.
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
