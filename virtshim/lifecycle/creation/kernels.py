"""The kernel that the pod has its VM started with, out of the image, and what that kernel needs: beside its root disk."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from virtshim.domain.errors import InvalidRequest
from virtshim.domain.hardware.annotations import INITRD, KERNEL
from virtshim.domain.image import NO_DISK, BootFile, Image
from virtshim.domain.layout import Layout, kernel_of
from virtshim.lifecycle.creation.step import Draft
from virtshim.ports.disks import KernelFiles
from virtshim.ports.images import BootFiles


@dataclass(frozen=True, slots=True)
class Kernels:
    boot: BootFiles
    kernels: KernelFiles
    layout: Layout

    def refuse_missing(self, draft: Draft) -> None:
        """Before anything is written: a disk that stays with its pod, or a volume, would be of an image that does not start."""
        wanted, image = draft.options.hardware, draft.image
        if not wanted.kernel and image.boot and image.digest == NO_DISK:
            raise InvalidRequest(
                f"image {draft.container.config.image!r} has no disk to start from; write which kernel of its "
                f"{_listed(image)} to start (annotation {KERNEL})"
            )
        for annotation, path in ((KERNEL, wanted.kernel), (INITRD, wanted.initrd)):
            if path and not self._is_kept(draft, path) and _in(image, path) is None:
                raise InvalidRequest(
                    f"annotation {annotation}: image {draft.container.config.image!r} has no file {path}; it has {_listed(image)}"
                )

    def beside(self, draft: Draft) -> Draft:
        """The disk is there, and its directory; they go with it."""
        wanted = draft.options.hardware
        return dataclasses.replace(
            draft, kernel_file=self._copied(draft, wanted.kernel), initrd_file=self._copied(draft, wanted.initrd)
        )

    def _copied(self, draft: Draft, path: str) -> str:
        """The VM's own: QEMU of another one shall not read it, and an image may be removed."""
        if not path:
            return ""
        final = kernel_of(self.layout, draft.container, path)
        if not self._is_kept(draft, path) and (found := _in(draft.image, path)) is not None:
            self.kernels.copy(self.boot.path(found.digest), final)
        return final

    def _is_kept(self, draft: Draft, path: str) -> bool:
        """A root disk that stays with its pod has kernel and modules of one image, whatever its name has come to mean."""
        container = draft.container
        return bool(container.spec.pod_disk) and self.kernels.is_there(kernel_of(self.layout, container, path))


def _in(image: Image, path: str) -> BootFile | None:
    return next((one for one in image.boot if one.path == path), None)


def _listed(image: Image) -> str:
    return ", ".join(one.path for one in image.boot) or "none there, or none that a pull has kept (pull it again)"
