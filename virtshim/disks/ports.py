"""VMs' root disks."""

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
        """A qcow2 on top of the image, guest-visible size max(image, size_bytes). Replaces a half-made one."""

    def delete(self, container: ContainerId, *, disk_alone: bool = False) -> None:
        """Removes the container's whole state directory: disk, seed, raw console log; or its root disk alone, of a VM that is
        off. No disk of the pod."""

    def make_directory(self, container: ContainerId) -> None:
        """The container's directories, for one whose root disk is the pod's. `create` makes them too."""

    def create_pod_disk(self, name: str, base: Image, base_path: str, size_bytes: int) -> Disk:
        """As `create`, for the pod: it is there whole or not at all, and one that is there is never replaced."""

    def pod_disk(self, name: str) -> Disk | None:
        """The pod's disk of that name, if it is there."""

    def delete_pod_disks(self, pod: str) -> None:
        """All disks of that pod (`pod_disk.pod_hash`)."""

    def pods_with_disks(self) -> frozenset[str]:
        """The pods that something is there of."""

    def existing(self) -> frozenset[ContainerId]:
        """Containers that have a state directory."""

    def use(self, container: ContainerId, pod_disk: str = "") -> DiskUsage | None:
        """What the container's state directory takes, its root disk above all; and `pod_disk`, the pod's disk, if it has one.
        None if there is no directory."""

    def free_bytes(self) -> int:
        """Bytes that disks may still grow by."""


class DiskPlaces(Protocol):
    """What belongs to pods' disks (see `RootDisks`), as long as they are there: what their guests know their devices by,
    their firmware, and their TPMs."""

    def read(self, disk: str) -> Places:
        """Nothing if nothing is there, or it cannot be read."""

    def keep(self, disk: str, places: Places) -> None:
        """On disk when it returns."""

    def firmware(self, disk: str, kind: Firmware) -> FirmwareFiles | None:
        """The files whose variables are beside the disk; None if none are there yet, whatever was noted, or it cannot be read."""

    def keep_firmware(self, disk: str, kind: Firmware, files: FirmwareFiles) -> None:
        """On disk when it returns. Before there are variables: which are theirs nobody could tell later."""

    def keep_tpm(self, disk: str, domain: uuid.UUID) -> None:
        """What the TPM of that VM remembers goes with the disk, too."""

    def tpm_owners(self, domain: uuid.UUID) -> frozenset[str]:
        """The pods (`pod_disk.pod_hash`) for whose disks that was said."""


class KernelFiles(Protocol):
    """Files of images that VMs are started with, as each VM has its own of them."""

    def is_there(self, path: str) -> bool:
        """Whether it is, which means whole."""

    def copy(self, source: str, path: str) -> None:
        """Whole and on disk when it returns; anew if it is there. Its directory is. NotFound if `source` is gone,
        ResourceExhausted if it does not fit."""


class EmptyDiskFiles(Protocol):
    """Beside a container's root disk, with which they go."""

    def create(self, container: ContainerId, wanted: EmptyDisk) -> Disk:
        """In the container's directory, which is there; anew if it is there. ResourceExhausted if it does not fit."""


class ContainersRoom(Protocol):
    def filesystem_usage(self) -> FilesystemUsage:
        """What the directories of all containers and the disks of all pods take."""


class RootVolumes(Protocol):
    """Block volumes that VMs boot from, by the path of the device. They outlive pods: nothing of them is ever removed. `begin`,
    `copy` and `seal` make a root disk, in that order, and each may be repeated; until `seal` has returned, or after a kill at any
    moment before that, the volume has none."""

    def look(self, device: str) -> RootVolume:
        """What is on it."""

    def begin(self, device: str, container: ContainerId) -> None:
        """Whatever was on it is no root disk any more. WrongState if somebody else writes it."""

    def copy(self, device: str, container: ContainerId, image: Image, image_path: str) -> None:
        """The image is on it, and on disk. WrongState if `begin` was not called for this container last."""

    def seal(self, device: str, container: ContainerId, image: ImageDigest) -> None:
        """From now on it is a root disk. WrongState as `copy`."""

    def keep_places(self, device: str, places: Places) -> None:
        """What the guest of that root disk knows its devices by, for `look`. On one that Virtlet has made nothing is written.
        WrongState if somebody else writes it."""

    def disk(self, device: str) -> Disk:
        """Of a root disk."""
