"""Step: the directory of the container, and its root disk over the image."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from virtshim.domain.container import Container
from virtshim.domain.vm import Backing, Disk
from virtshim.lifecycle.creation.step import Draft
from virtshim.ports.disks import RootDisks
from virtshim.ports.images import ImageFiles


@dataclass(frozen=True, slots=True)
class RootDisk:
    files: ImageFiles
    disks: RootDisks

    def make(self, draft: Draft) -> Draft:
        return draft.with_disk(dataclasses.replace(self._disk(draft), backing=self._backing(draft)))

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

    def _backing(self, draft: Draft) -> Backing:
        """The image that the disk was made over: for the pod's disk that of its first attempt. By records alone: what is in the
        disk its VM may have written."""
        container, image = draft.container, draft.image
        first = draft.sandbox.root_disks.get(container.name.name) if container.spec.pod_disk else None
        if first is None or first == image.digest:
            return Backing(self.files.path(image.digest), image.format)
        return Backing(self.files.path(first), self.files.format_of(first))
