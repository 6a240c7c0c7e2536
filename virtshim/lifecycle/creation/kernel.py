"""Step: the kernel that the pod has its VM started with, out of the image, and what that kernel needs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from virtshim.domain.container import Container
from virtshim.domain.errors import InvalidRequest
from virtshim.domain.hardware.annotations import INITRD, KERNEL
from virtshim.domain.image import NO_DISK, Image
from virtshim.domain.layout import Layout, kernel_of
from virtshim.lifecycle.creation.step import Draft
from virtshim.ports.disks import KernelFiles
from virtshim.ports.images import BootFiles
from virtshim.primitives import observed


@dataclass(frozen=True, slots=True)
class Kernel:
    measured_as: ClassVar[observed.Step] = observed.Step.DISK
    boot: BootFiles
    kernels: KernelFiles
    layout: Layout

    def make(self, draft: Draft) -> Draft:
        wanted, image = draft.options.hardware, draft.image
        if not wanted.kernel:
            if image.boot and image.digest == NO_DISK:
                raise InvalidRequest(
                    f"image {draft.container.config.image!r} has no disk to start from; write which kernel of its "
                    f"{_listed(image)} to start (annotation {KERNEL})"
                )
            return draft
        return dataclasses.replace(
            draft,
            kernel_file=self._file(draft, KERNEL, wanted.kernel),
            initrd_file=self._file(draft, INITRD, wanted.initrd) if wanted.initrd else "",
        )

    def undo(self, container: Container) -> None:
        """It lies beside the root disk, and goes with it."""

    def _file(self, draft: Draft, annotation: str, path: str) -> str:
        """The VM's own: QEMU of another one shall not read it, and an image may be removed. A root disk that stays with its pod
        has kernel and modules of one image, whatever its name has come to mean."""
        container, image = draft.container, draft.image
        final = kernel_of(self.layout, container, path)
        if container.spec.pod_disk and self.kernels.is_there(final):
            return final
        found = next((one for one in image.boot if one.path == path), None)
        if found is None:
            raise InvalidRequest(
                f"annotation {annotation}: image {container.config.image!r} has no file {path}; it has {_listed(image)}"
            )
        self.kernels.copy(self.boot.path(found.digest), final)
        return final


def _listed(image: Image) -> str:
    return ", ".join(one.path for one in image.boot) or "none there, or none that a pull has kept (pull it again)"
