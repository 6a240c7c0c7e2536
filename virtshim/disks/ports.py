"""Ports to VMs' disks: root disks and the files beside them, empty disks, and block volumes that VMs boot from."""

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
    """Copy-on-write root disks: containers' own disks, and pods' disks, which live as long as their pod (for their names see
    `virtshim.model.sandbox`)."""

    def create(self, container: ContainerId, base: Image, base_path: str, size_bytes: int) -> Disk:
        """Creates a qcow2 on top of the image; the guest sees max(image, size_bytes) bytes. Replaces an incomplete one."""

    def delete(self, container: ContainerId, *, disk_alone: bool = False) -> None:
        """Removes the container's whole state directory (disk, seed, raw console log), or only the disks of a VM that is
        off. Never removes a pod's disk."""

    def make_directory(self, container: ContainerId) -> None:
        """Creates the container's directories, for a container that uses a pod's disk. `create` creates them too."""

    def create_pod_disk(self, name: str, base: Image, base_path: str, size_bytes: int) -> Disk:
        """Like `create`, for the pod: the disk exists completely or not at all, and an existing one is never
        replaced."""

    def pod_disk(self, name: str) -> Disk | None:
        """The pod's disk with that name, if it exists."""

    def delete_pod_disks(self, pod: str) -> None:
        """All disks of that pod (`pod_hash`), or of that VM, whose record stays (`virtshim.model.sandbox.owner_of`)."""

    def pods_with_disks(self) -> frozenset[str]:
        """The pods that have files on disk."""

    def existing(self) -> frozenset[ContainerId]:
        """Containers that have a state directory."""

    def use(self, container: ContainerId, pod_disk: str = "") -> DiskUsage | None:
        """Disk usage of the container's state directory and of `pod_disk`, if given. None if there is no directory."""

    def free_bytes(self) -> int:
        """How many bytes disks may still grow."""


class DiskPlaces(Protocol):
    """What is stored beside a pod's disk and removed with it: the device addresses that its guest knows, its firmware, and
    its TPMs. Errors: InternalError."""

    def read(self, disk: str) -> Places:
        """Empty if nothing is stored, or if its content is malformed."""

    def keep(self, disk: str, places: Places) -> None:
        """The addresses are on disk on return."""

    def firmware(self, disk: str, kind: Firmware) -> FirmwareFiles | None:
        """The firmware that made the variables beside the disk. None if there are no variables yet, even if a firmware is
        stored, or if the stored content is malformed."""

    def keep_firmware(self, disk: str, kind: Firmware, files: FirmwareFiles) -> None:
        """Stores the firmware; it is on disk on return. Called before the variables exist, because they do not reveal their
        firmware."""

    def keep_tpm(self, disk: str, domain: uuid.UUID) -> None:
        """Stores that the state of that VM's TPM is to be removed with the disk."""

    def tpm_owners(self, domain: uuid.UUID) -> frozenset[str]:
        """The pods (`pod_disk.pod_hash`) whose disks own that TPM."""


class KernelFiles(Protocol):
    """Kernels and initial RAM disks of images. Each VM has its own copies."""

    def is_there(self, path: str) -> bool:
        """Whether the complete file exists."""

    def copy(self, source: str, path: str) -> None:
        """Copies the file; it is complete and on disk on return. Replaces an existing one. The directory must exist.
        Raises NotFound if `source` is gone, ResourceExhausted if there is no space."""


class EmptyDiskFiles(Protocol):
    """Empty disks beside a container's root disk, removed together with it."""

    def create(self, container: ContainerId, wanted: EmptyDisk) -> Disk:
        """Creates the disk in the container's directory, which must exist. Replaces an existing one. Raises
        ResourceExhausted if there is no space."""


class ContainersRoom(Protocol):
    def filesystem_usage(self) -> FilesystemUsage:
        """Disk usage of all containers' directories and all pods' disks."""


class RootVolumes(Protocol):
    """Block volumes that VMs boot from, by device path. They outlive pods, and nothing on them is ever removed.
    `begin`, `copy` and `seal`, in this order, make a root disk; each may be repeated. The volume has no root disk until
    `seal` returns, even if virtshim is killed before."""

    def look(self, device: str) -> RootVolume:
        """Reads what is on the volume."""

    def begin(self, device: str, container: ContainerId) -> None:
        """Invalidates the root disk on the volume. Raises WrongState if something else is writing to the volume."""

    def copy(self, device: str, container: ContainerId, image: Image, image_path: str) -> None:
        """Copies the image to the volume; the copy is on disk on return. Raises WrongState if the last `begin` was for
        another container."""

    def seal(self, device: str, container: ContainerId, image: ImageDigest) -> None:
        """Makes the volume a root disk. Raises WrongState as `copy` does."""

    def keep_places(self, device: str, places: Places) -> None:
        """Stores the device addresses that the root disk's guest knows; `look` returns them. Does not write to a disk that
        Virtlet made. Raises WrongState as `begin` does."""

    def disk(self, device: str) -> Disk:
        """The volume's root disk, for a VM."""
