"""Ports to VMs' disks: root disks, what is kept beside them, empty disks, and block volumes that VMs boot from."""

from __future__ import annotations

import uuid
from typing import Protocol

from virtshim.model.hardware import Firmware, FirmwareFiles, Places
from virtshim.model.ids import ContainerId, ImageDigest
from virtshim.model.image import FilesystemUsage, Image
from virtshim.model.usage import DiskUsage
from virtshim.model.vm import Disk
from virtshim.volumes.empty_disks import EmptyDisk
from virtshim.volumes.root_volume import RootVolume


class RootDisks(Protocol):
    """Copy-on-write root disks: a container's own, and those that stay for a pod's life (by name, see
    `virtshim.model.sandbox`)."""

    def create(self, container: ContainerId, base: Image, base_path: str, size_bytes: int) -> Disk:
        """Makes a qcow2 over the image; the guest sees max(image, size_bytes) bytes. Replaces a half-made one."""

    def delete(self, container: ContainerId, *, disk_alone: bool = False) -> None:
        """Removes the container's whole state directory (disk, seed, raw console log), or only the root disk of a VM
        that is off. Never removes a pod's disk."""

    def make_directory(self, container: ContainerId) -> None:
        """Makes the container's directories, if its root disk is the pod's. `create` makes them too."""

    def create_pod_disk(self, name: str, base: Image, base_path: str, size_bytes: int) -> Disk:
        """Like `create`, for the pod: the disk exists completely or not at all, and an existing one is never
        replaced."""

    def pod_disk(self, name: str) -> Disk | None:
        """The pod's disk with that name, if it exists."""

    def delete_pod_disks(self, pod: str) -> None:
        """All disks of that pod (`pod_disk.pod_hash`)."""

    def pods_with_disks(self) -> frozenset[str]:
        """The pods that have anything on disk."""

    def existing(self) -> frozenset[ContainerId]:
        """Containers that have a state directory."""

    def use(self, container: ContainerId, pod_disk: str = "") -> DiskUsage | None:
        """What the container's state directory takes, mostly its root disk; and `pod_disk`, the pod's disk, if it has
        one. None if there is no directory."""

    def free_bytes(self) -> int:
        """How many bytes disks may still grow."""


class DiskPlaces(Protocol):
    """What belongs to pods' disks (see `RootDisks`) while they exist: device addresses that their guests know,
    firmware, and TPMs."""

    def read(self, disk: str) -> Places:
        """Empty if nothing is stored, or if it cannot be read."""

    def keep(self, disk: str, places: Places) -> None:
        """The places are on disk on return."""

    def firmware(self, disk: str, kind: Firmware) -> FirmwareFiles | None:
        """The firmware of the variables beside the disk. None if there are no variables yet, whatever was noted, or if
        it cannot be read."""

    def keep_firmware(self, disk: str, kind: Firmware, files: FirmwareFiles) -> None:
        """On disk on return. Called before the variables exist, because nobody could tell their firmware later."""

    def keep_tpm(self, disk: str, domain: uuid.UUID) -> None:
        """Notes that the state of that VM's TPM is removed with the disk."""

    def tpm_owners(self, domain: uuid.UUID) -> frozenset[str]:
        """The pods (`pod_disk.pod_hash`) whose disks have that TPM."""


class KernelFiles(Protocol):
    """Files of images that VMs are started with. Each VM has copies of its own."""

    def is_there(self, path: str) -> bool:
        """Whether the complete file exists."""

    def copy(self, source: str, path: str) -> None:
        """Copies the file; it is complete and on disk on return. Replaces an existing one. The directory must exist.
        NotFound if `source` is gone, ResourceExhausted if it does not fit."""


class EmptyDiskFiles(Protocol):
    """Empty disks beside a container's root disk, removed together with it."""

    def create(self, container: ContainerId, wanted: EmptyDisk) -> Disk:
        """Makes the disk in the container's directory, which must exist. Replaces an existing one. ResourceExhausted if
        it does not fit."""


class ContainersRoom(Protocol):
    def filesystem_usage(self) -> FilesystemUsage:
        """What all containers' directories and all pods' disks take."""


class RootVolumes(Protocol):
    """Block volumes that VMs boot from, by device path. They outlive pods, and nothing on them is ever removed.
    `begin`, `copy` and `seal`, in that order, make a root disk, and each may be repeated. Until `seal` has returned,
    the volume has no root disk, also after a kill."""

    def look(self, device: str) -> RootVolume:
        """What is on it."""

    def begin(self, device: str, container: ContainerId) -> None:
        """Whatever is on the volume is no root disk from now on. WrongState if somebody else writes it."""

    def copy(self, device: str, container: ContainerId, image: Image, image_path: str) -> None:
        """Copies the image to the volume; it is on disk on return. WrongState if the last `begin` was for another
        container."""

    def seal(self, device: str, container: ContainerId, image: ImageDigest) -> None:
        """Makes it a root disk. WrongState as for `copy`."""

    def keep_places(self, device: str, places: Places) -> None:
        """Stores the device addresses that the guest of that root disk knows, for `look`. Writes nothing on a disk that
        Virtlet has made. WrongState if somebody else writes it."""

    def disk(self, device: str) -> Disk:
        """Of a root disk."""
