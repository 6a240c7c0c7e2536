"""Where a guest found its disks and NICs when its root disk was first started, and on which machine type. Pure.

A guest calls devices by their addresses: a NIC is `enp0s16`, Windows takes a disk elsewhere for another one, and a licence may
go by all of them. So they are written down beside a root disk that outlives its container; what comes later gets a place that is
free. For a disk that goes with its container the VM's only definition says all of it.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

# What a pod asks of its VM's hardware, beside processors, memory and disks.


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


_MAGIC: Final = b"vmplaces"
_LONGEST_MACHINE: Final = 32
# A letter for what is numbered, three bytes of a hash of the name, the number.
_ENTRY_BYTES: Final = 5
# All the disks and NICs that a VM can have.
MOST: Final = 74
# What it is written in.
BYTES: Final = len(_MAGIC) + 1 + _LONGEST_MACHINE + 1 + MOST * _ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Places:
    """`machine`: "" is not known. `numbers`: by `_key`."""

    machine: str = ""
    numbers: Mapping[bytes, int] = field(default_factory=dict)

    def numbered(self, kind: str, names: Sequence[str], room: int) -> tuple[Places, tuple[int, ...]]:
        """The number of each, less than `room` if they fit; with what was not there yet. `kind`, a letter: what is numbered
        together. A number of something that is gone stays its own, as long as there is room beside it; one that there is no room
        for is none."""
        keys = [_key(kind, name) for name in names]
        there = {self.numbers[key] for key in keys if key in self.numbers}
        gone = {number for key, number in self.numbers.items() if key[:1] == kind.encode()} - there
        found: list[int] = []
        for key in keys:
            number = self.numbers.get(key)
            if number is None or number in found or number >= room:
                number = _lowest_beside({*there, *gone, *found})
                if number >= room:
                    number = _lowest_beside({*there, *found})
            found.append(number)
        numbers = {**self.numbers, **dict(zip(keys, found, strict=True))}
        if len(numbers) > MOST:
            numbers = {key: number for key, number in numbers.items() if key in keys or key[:1] != kind.encode()}
        return dataclasses.replace(self, numbers=numbers), tuple(found)

    def to_bytes(self) -> bytes:
        """BYTES at most."""
        machine = self.machine.encode("ascii", "replace")[:_LONGEST_MACHINE]
        entries = b"".join(key + bytes([number]) for key, number in list(self.numbers.items())[:MOST])
        return _MAGIC + bytes([len(machine)]) + machine + bytes([len(entries) // _ENTRY_BYTES]) + entries


def places_from_bytes(text: bytes) -> Places:
    """What `to_bytes` wrote at the beginning of `text`; nothing if that is not there whole."""
    if not text.startswith(_MAGIC):
        return Places()
    at = len(_MAGIC)
    machine, rest = text[at + 1 : at + 1 + text[at]] if len(text) > at else b"", text[at + 1 :]
    rest = rest[len(machine) :]
    entries = rest[1 : 1 + rest[0] * _ENTRY_BYTES] if rest else b""
    if not rest or len(entries) != rest[0] * _ENTRY_BYTES or not machine.decode("latin-1").isprintable():
        return Places()
    each = [entries[start : start + _ENTRY_BYTES] for start in range(0, len(entries), _ENTRY_BYTES)]
    return Places(machine.decode("latin-1"), {entry[:-1]: entry[-1] for entry in each})


def _key(kind: str, name: str) -> bytes:
    return kind.encode() + hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:3]


def _lowest_beside(taken: set[int]) -> int:
    return next(number for number in range(256) if number not in taken)
