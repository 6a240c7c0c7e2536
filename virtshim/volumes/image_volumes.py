"""Images that are volumes of a pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from virtshim.devices.guest_view import normal_path
from virtshim.images.ports import ImageFiles
from virtshim.images.service import ImageService, stored_images
from virtshim.model.container import Container, ContainerConfig, Mount
from virtshim.model.errors import NotFound, ShimError, WrongState
from virtshim.model.text import escaped
from virtshim.volumes.shares import SharedVolume, VolumeImage


@dataclass(frozen=True, slots=True)
class ImageVolumes:
    images: ImageService
    files: ImageFiles

    def shared_volumes(self, config: ContainerConfig) -> Mapping[str, SharedVolume]:
        """The image volumes, by their paths in the guest. Until the container's record is written, the images may still
        be removed. Raises ShimError for a volume that cannot be provided; the message starts with the word that kubelet
        maps to a reason."""
        found = {}
        for mount in config.mounts:
            if mount.image:
                guest = normal_path(mount.container_path)
                try:
                    found[guest] = self._volume(guest, mount)
                except ShimError as exc:
                    where = f"config.mounts[{escaped(guest, 200)}].image"
                    raise type(exc)(f"ImageVolumeMountFailed: {where} {escaped(mount.image, 200)}: {exc}") from exc
        return found

    def _volume(self, guest: str, mount: Mount) -> SharedVolume:
        image = self.images.find(mount.image)
        if image is None:
            raise NotFound("the image is not on this node; pull it first")
        if image.tree is None:
            raise WrongState(
                "the image has no files here: it is a plain disk, or it was pulled before image volumes were supported (remove "
                "it and pull it again), or its files were refused (image.no_volume in virtshim's log)"
            )
        host = self.files.path(image.tree, mount.image_sub_path)
        return SharedVolume(guest, host, readonly=True, image=VolumeImage(image.tree, image.id, image.id.value))


def collect_images_of(container: Container, images: ImageService) -> None:
    """Collects unused images of a container whose record is gone."""
    for digest in stored_images(container):
        images.collect(digest)
