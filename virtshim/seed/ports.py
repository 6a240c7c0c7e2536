"""What a guest is told at its first boot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from virtshim.annotations.options import VmOptions
from virtshim.devices.values import BlockDevice
from virtshim.model.ids import ContainerId
from virtshim.model.network import Dns, Interface
from virtshim.model.sandbox import PodKey
from virtshim.model.vm import Disk
from virtshim.volumes.copies import CopiedVolume
from virtshim.volumes.empty_disks import EmptyDisk
from virtshim.volumes.memory_volumes import MemoryVolume
from virtshim.volumes.shares import SharedVolume


@dataclass(frozen=True, slots=True)
class SeedRequest:
    """What cloud-init is told. `interfaces` empty, or `options.force_dhcp`, leaves network-config out. `hosts_file` is kubelet's,
    "" for none; `envs` the container's variables."""

    container: ContainerId
    pod: PodKey
    hostname: str
    options: VmOptions
    interfaces: tuple[Interface, ...]
    dns: Dns
    hosts_file: str = ""
    envs: tuple[tuple[str, bytes], ...] = ()
    # Those that are disks beside its own.
    blocks: tuple[BlockDevice, ...] = ()
    # Who its root disk is, if that is there before and after the container; "" for a disk of its own.
    kept_disk: str = ""
    # As they are numbered in the guest.
    volumes: tuple[SharedVolume, ...] = ()
    sysctls: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[CopiedVolume, ...] = ()
    # An archive of what the copied ones hold.
    copied: bytes = b""
    empty_disks: tuple[EmptyDisk, ...] = ()
    memory_volumes: tuple[MemoryVolume, ...] = ()


class GuestSeeds(Protocol):
    """What a guest finds at its first boot: cloud-init's seed ISO, Ignition's configuration, Windows' answer file."""

    def create(self, request: SeedRequest) -> Disk:
        """Writes the ISO into the container's directory (made if missing)."""

    def write_ignition(self, container: ContainerId, text: str) -> str:
        """The path of a file for the guest's firmware, in the container's directory, which is there."""

    def write_sysprep(self, container: ContainerId, files: Mapping[str, bytes]) -> str:
        """The path of an ISO with these in its root directory, likewise."""
