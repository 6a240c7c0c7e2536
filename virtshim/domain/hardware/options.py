"""What a pod asks of its VM's hardware, beside processors, memory and disks."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Firmware(enum.Enum):
    """SECURE: UEFI that starts only what is signed, with Microsoft's keys and those of the distribution's package."""

    BIOS = "bios"
    UEFI = "uefi"
    SECURE = "uefi-secure"

    @property
    def is_uefi(self) -> bool:
        return self is not Firmware.BIOS


@dataclass(frozen=True, slots=True)
class FirmwareFiles:
    """Of a UEFI, both raw: its program, and what a VM's variables begin as."""

    code: str
    variables: str


class Cache(enum.Enum):
    """How files that are disks are written. What may lose what the guest was told is safe (QEMU's `unsafe`) is not among them."""

    WRITEBACK = "writeback"
    NONE = "none"
    WRITETHROUGH = "writethrough"
    DIRECTSYNC = "directsync"

    @property
    def is_direct(self) -> bool:
        """Past the host's page cache: the file system must have O_DIRECT."""
        return self in (Cache.NONE, Cache.DIRECTSYNC)


class DiskIo(enum.Enum):
    THREADS = "threads"
    NATIVE = "native"


class NicModel(enum.Enum):
    VIRTIO = "virtio"
    E1000E = "e1000e"
    E1000 = "e1000"
    RTL8139 = "rtl8139"


class Video(enum.Enum):
    VGA = "vga"
    VIRTIO = "virtio"


class Clock(enum.Enum):
    """libvirt's words for what the hardware clock counts in."""

    UTC = "utc"
    LOCALTIME = "localtime"


@dataclass(frozen=True, slots=True)
class Topology:
    sockets: int
    cores: int
    threads: int

    @property
    def count(self) -> int:
        return self.sockets * self.cores * self.threads


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    firmware: Firmware = Firmware.BIOS
    # A TPM 2.0, by swtpm.
    tpm: bool = False
    cache: Cache = Cache.WRITEBACK
    io: DiskIo = DiskIo.THREADS
    nic_model: NicModel = NicModel.VIRTIO
    video: Video = Video.VGA
    # It resets the guest.
    watchdog: bool = False
    # None: one socket, and a core for each vCPU.
    topology: Topology | None = None
    # Hyper-V's enlightenments, under KVM.
    hyperv: bool = False
    clock: Clock = Clock.UTC
    tablet: bool = False
    # What starts in place of a boot loader: paths in the image, "" for none, and the kernel's command line.
    kernel: str = ""
    initrd: str = ""
    kernel_args: str = ""
