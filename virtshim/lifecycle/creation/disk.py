"""Step: the directory of the container, and its root disk: over the image, or on a volume; and the kernel that belongs to it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import structlog

from virtshim.domain.container import Container
from virtshim.domain.pod_disk import identity
from virtshim.domain.vm import Backing, Disk
from virtshim.domain.volumes.root_volume import must_be_written
from virtshim.lifecycle.creation.kernels import Kernels
from virtshim.lifecycle.creation.step import Draft
from virtshim.ports.disks import RootDisks, RootVolumes
from virtshim.ports.images import ImageFiles
from virtshim.primitives import observed

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RootDisk:
    measured_as: ClassVar[observed.Step] = observed.Step.DISK
    files: ImageFiles
    disks: RootDisks
    volumes: RootVolumes
    kernels: Kernels

    def make(self, draft: Draft) -> Draft:
        self.kernels.refuse_missing(draft)
        return self.kernels.beside(self._with_disk(draft))

    def _with_disk(self, draft: Draft) -> Draft:
        if (volume := draft.container.granted.root_volume) is not None:
            self.disks.make_directory(draft.container.id)
            return self._on_volume(draft, volume.host_path)
        disk = dataclasses.replace(self._disk(draft), backing=self._backing(draft))
        name = draft.container.spec.pod_disk
        return dataclasses.replace(draft.with_disk(disk), kept_disk=identity(name) if name else "")

    def undo(self, container: Container) -> None:
        """With all that later steps wrote into the directory. The pod's disk is no part of it: it stays for the next attempt."""
        self.disks.delete(container.id)

    def _disk(self, draft: Draft) -> Disk:
        container, image = draft.container, draft.image
        path, size = self.files.path(image.digest), draft.options.root_volume_bytes
        if not container.spec.pod_disk:
            return self.disks.create(container.id, image, path, size)
        self.disks.make_directory(container.id)
        pod_disk = self.disks.pod_disk(container.spec.pod_disk)
        return pod_disk or self.disks.create_pod_disk(container.spec.pod_disk, image, path, size)

    def _on_volume(self, draft: Draft, device: str) -> Draft:
        """A call that is repeated after a kill finds how far it came. Nothing is undone: the volume outlives the container, and a
        half copy is none."""
        own, image = draft.container.id, draft.image
        found = self.volumes.look(device)
        kept_disk = found.identity
        if must_be_written(found, image, replace=draft.options.replace_root_disk):
            log.info("root_volume.written", container=own.short, device=device, image=image.digest.value)
            self.volumes.begin(device, own)
            self.volumes.copy(device, own, image, self.files.path(image.digest))
            self.volumes.seal(device, own, image.digest)
            kept_disk = own.short
        return dataclasses.replace(draft.with_disk(self.volumes.disk(device)), kept_disk=kept_disk)

    def _backing(self, draft: Draft) -> Backing:
        """The image that the disk was made over: for the pod's disk that of its first attempt. By records alone: what is in the
        disk its VM may have written."""
        container, image = draft.container, draft.image
        first = draft.sandbox.root_disks.get(container.name.name) if container.spec.pod_disk else None
        if first is None or first == image.digest:
            return Backing(self.files.path(image.digest), image.format)
        return Backing(self.files.path(first), self.files.format_of(first))
