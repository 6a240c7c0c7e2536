"""Ports for what a guest reads at its first boot."""

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
    """The content of the cloud-init seed. Without `interfaces`, or with `options.force_dhcp`, there is no network-config.
    `hosts_file`: the path of kubelet's hosts file, or "". `envs`: the container's environment variables."""

    container: ContainerId
    pod: PodKey
    hostname: str
    options: VmOptions
    interfaces: tuple[Interface, ...]
    dns: Dns
    hosts_file: str = ""
    envs: tuple[tuple[str, bytes], ...] = ()
    # Block volumes, which are further disks of the VM.
    blocks: tuple[BlockDevice, ...] = ()
    # The id of a root disk that outlives the container; "" for a disk of the container's own.
    kept_disk: str = ""
    # In the order of their numbers in the guest.
    volumes: tuple[SharedVolume, ...] = ()
    sysctls: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[CopiedVolume, ...] = ()
    # An archive with the content of `copies`.
    copied: bytes = b""
    empty_disks: tuple[EmptyDisk, ...] = ()
    memory_volumes: tuple[MemoryVolume, ...] = ()


class GuestSeeds(Protocol):
    """Writes cloud-init's seed ISO, Ignition's configuration, and Windows' answer file."""

    def create(self, request: SeedRequest) -> Disk:
        """Writes the ISO into the container's directory, and creates the directory if it is missing."""

    def write_ignition(self, container: ContainerId, text: str) -> str:
        """Writes the file for the guest's firmware into the container's directory, which must exist, and returns its path."""

    def write_sysprep(self, container: ContainerId, files: Mapping[str, bytes]) -> str:
        """Writes an ISO with `files` in its root directory, likewise, and returns its path."""
