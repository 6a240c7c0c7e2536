"""A VM's hardware: what a pod asks for, and which addresses its devices have. Pure.

A guest identifies devices by their addresses: a NIC is `enp0s16`, Windows takes a disk at another address for another
disk, and a licence may depend on all of them. So if a root disk outlives its container, the addresses of the first start
are stored beside the disk, and a device that is added later gets a free address. If a root disk is removed with its
container, nothing is stored, because the VM is defined only once, and its definition has the addresses.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

# What a pod asks for, besides processors, memory and disks.


class Firmware(enum.Enum):
    """SECURE: UEFI that only starts signed programs, with the keys of Microsoft and of the distribution's package."""

    BIOS = "bios"
    UEFI = "uefi"
    SECURE = "uefi-secure"

    @property
    def is_uefi(self) -> bool:
        return self is not Firmware.BIOS


@dataclass(frozen=True, slots=True)
class FirmwareFiles:
    """The files of a UEFI, both raw: its program, and the template of a VM's variables."""

    code: str
    variables: str


class Cache(enum.Enum):
    """How QEMU writes files that are disks. QEMU's `unsafe` is missing, because it loses data that the guest believes
    written."""

    WRITEBACK = "writeback"
    NONE = "none"
    WRITETHROUGH = "writethrough"
    DIRECTSYNC = "directsync"

    @property
    def is_direct(self) -> bool:
        """Whether it bypasses the host's page cache, for which the file system needs O_DIRECT."""
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
    """libvirt's name of the hardware clock's base."""

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
    # Whether it has a TPM 2.0, by swtpm.
    tpm: bool = False
    cache: Cache = Cache.WRITEBACK
    io: DiskIo = DiskIo.THREADS
    nic_model: NicModel = NicModel.VIRTIO
    video: Video = Video.VGA
    # Whether it has a watchdog, which resets the guest.
    watchdog: bool = False
    # None: one socket with a core for each vCPU.
    topology: Topology | None = None
    # Whether it has Hyper-V's enlightenments under KVM.
    hyperv: bool = False
    clock: Clock = Clock.UTC
    tablet: bool = False
    # Direct kernel boot: paths in the image, "" for none, and the kernel's command line.
    kernel: str = ""
    initrd: str = ""
    kernel_args: str = ""


_MAGIC: Final = b"vmplaces"
_LONGEST_MACHINE: Final = 32
# An entry: a letter for the kind, three bytes of a hash of the name, and the number.
_ENTRY_BYTES: Final = 5
# The most disks and NICs of a VM.
MOST: Final = 74
# The size of the stored form.
BYTES: Final = len(_MAGIC) + 1 + _LONGEST_MACHINE + 1 + MOST * _ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Places:
    """Where a guest's devices are. `machine`: the machine type, "" if unknown. `numbers`: each device's number, by `_key`."""

    machine: str = ""
    numbers: Mapping[bytes, int] = field(default_factory=dict)

    def numbered(self, kind: str, names: Sequence[str], room: int) -> tuple[Places, tuple[int, ...]]:
        """Gives each device in `names` a number, which stands for its address. Returns the places with the new devices added,
        and the numbers in the order of `names`. Devices of different `kind` (a letter) may have the same number. Numbers stay
        below `room` while enough are free. A removed device keeps its number until another device needs the number."""
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
        """At most BYTES long."""
        machine = self.machine.encode("ascii", "replace")[:_LONGEST_MACHINE]
        entries = b"".join(key + bytes([number]) for key, number in list(self.numbers.items())[:MOST])
        return _MAGIC + bytes([len(machine)]) + machine + bytes([len(entries) // _ENTRY_BYTES]) + entries


def places_from_bytes(text: bytes) -> Places:
    """Reads what `to_bytes` wrote at the beginning of `text`; empty if it is incomplete."""
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
