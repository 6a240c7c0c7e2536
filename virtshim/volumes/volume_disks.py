"""Volumes that a VM has as disks, which only one VM may have at a time."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from virtshim.devices.values import BlockDevice
from virtshim.model.container import Container, ContainerConfig
from virtshim.model.errors import InvalidRequest, ShimError
from virtshim.model.sandbox import Sandbox
from virtshim.model.text import escaped
from virtshim.volumes.disk_images import DISK_IMAGES_ANNOTATION, DISK_IMAGES_FILE, flex_volumes_parse
from virtshim.volumes.empty_disks import EmptyDisk
from virtshim.volumes.pod_mounts import flex_mounts, image_mounts
from virtshim.volumes.ports import VolumeDiskFiles

# Which volumes of a pod are disks.


@dataclass(frozen=True, slots=True)
class VolumeDisks:
    """Raises ShimError, with the field, for volumes that cannot be provided."""

    files: VolumeDiskFiles

    def empty(self, config: ContainerConfig, pod_uid: str) -> Sequence[EmptyDisk]:
        """The empty disks of Virtlet's flexVolumes."""
        return [
            flex_volumes_parse(self._options(guest, host), posixpath.basename(host), guest)
            for guest, host in flex_mounts(config.mounts, config.annotations, pod_uid)
        ]

    def images(self, config: ContainerConfig, pod_uid: str, places: Collection[str]) -> tuple[BlockDevice, ...]:
        """The disks of the volumes with a disk image that are mounted at `places`."""
        found = []
        for mount, may_hold_one in image_mounts(config.mounts, config.annotations, pod_uid, places):
            guest, host = mount.container_path, mount.host_path
            with _field(guest):
                if not may_hold_one:
                    raise InvalidRequest(
                        f"such a volume cannot hold a disk image; remove the path from the annotation {DISK_IMAGES_ANNOTATION}"
                    )
                identity = self.files.image(host, readonly=mount.readonly)
            path = posixpath.join(host, DISK_IMAGES_FILE)
            found.append(BlockDevice(path, guest, mount.readonly, identity, is_file=True))
        return tuple(found)

    def _options(self, guest: str, host: str) -> bytes:
        with _field(guest):
            return self.files.flex_options(host)


@contextlib.contextmanager
def _field(guest: str) -> Iterator[None]:
    try:
        yield
    except ShimError as exc:
        raise type(exc)(f"config.mounts[{escaped(guest, 200)}]: {exc}") from exc


def anothers(volume: BlockDevice, other: Container, owner: Sandbox | None) -> str:
    """Why `volume` is not available: `other`, a container of the pod `owner`, has it."""
    pod = f"{owner.key.namespace}/{owner.key.name}" if owner else f"of sandbox {other.sandbox_id}"
    return (
        f"{volume.field_name}: container {other.id} ({other.name.name} of pod {pod}) has the volume {volume.host_path}, "
        "which only one virtual machine at a time can have; stop it first, or use another volume"
    )
