"""Volumes of a pod that its VM has as disks of its own."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from virtshim.domain.container import ContainerConfig
from virtshim.domain.devices.granted import BlockDevice
from virtshim.domain.errors import InvalidRequest, ShimError
from virtshim.domain.printable import escaped
from virtshim.domain.volumes import disk_images, flex_volumes
from virtshim.domain.volumes.empty_disks import EmptyDisk
from virtshim.domain.volumes.pod_mounts import flex_mounts, image_mounts
from virtshim.ports.volume_disks import VolumeDiskFiles


@dataclass(frozen=True, slots=True)
class VolumeDisks:
    """Raises ShimError for volumes that are not to be had, with the field."""

    files: VolumeDiskFiles

    def empty(self, config: ContainerConfig, pod_uid: str) -> Sequence[EmptyDisk]:
        """Of Virtlet's flexVolumes."""
        return [
            flex_volumes.parse(self._options(guest, host), posixpath.basename(host), guest)
            for guest, host in flex_mounts(config.mounts, config.annotations, pod_uid)
        ]

    def images(self, config: ContainerConfig, pod_uid: str, places: Collection[str]) -> tuple[BlockDevice, ...]:
        """Of volumes that hold a disk's image: those that are mounted at `places`."""
        found = []
        for mount, may_hold_one in image_mounts(config.mounts, config.annotations, pod_uid, places):
            guest, host = mount.container_path, mount.host_path
            with _field(guest):
                if not may_hold_one:
                    raise InvalidRequest(
                        f"such a volume holds no disk's image; remove the path from the annotation {disk_images.ANNOTATION}"
                    )
                identity = self.files.image(host, readonly=mount.readonly)
            path = posixpath.join(host, disk_images.FILE)
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
