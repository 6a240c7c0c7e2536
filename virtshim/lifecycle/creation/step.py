"""The steps of CreateContainer: each makes one thing that a VM is defined with, and knows how to take it away again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Protocol

from virtshim.domain.annotations.options import VmOptions
from virtshim.domain.container import Container
from virtshim.domain.image import Image
from virtshim.domain.sandbox import Sandbox
from virtshim.domain.vm import Disk
from virtshim.primitives import observed


@dataclass(frozen=True, slots=True)
class Draft:
    """A container whose record is written and whose VM is not defined yet: what the steps so far have made of it."""

    container: Container
    # As its record is now: a step that writes it hands on what it wrote.
    sandbox: Sandbox
    # The image under the root disk.
    image: Image
    # What the pod's annotations ask for.
    options: VmOptions
    # In the order in which they are attached: the boot disk first.
    disks: tuple[Disk, ...] = ()
    # Who the root disk is, 20 hex digits, if it outlives the container.
    kept_disk: str = ""
    # The file that Ignition finds in the firmware; "" for none.
    ignition_file: str = ""
    # What the firmware starts, and its RAM disk, likewise.
    kernel_file: str = ""
    initrd_file: str = ""
    # The CD-ROM with Windows' answer file, likewise.
    sysprep_iso: str = ""

    def with_disk(self, disk: Disk) -> Draft:
        return dataclasses.replace(self, disks=(*self.disks, disk))


class Step(Protocol):
    """The container's record is there before the first step and after the last undo. Steps are made in the order of the list that
    `app.assembly` builds, and undone in reverse."""

    measured_as: ClassVar[observed.Step]

    def make(self, draft: Draft) -> Draft:
        """Returns the draft with what was made. After an exception `undo` is called as well."""

    def undo(self, container: Container) -> None:
        """Afterwards nothing of it is there, whether it was made whole, half or not at all; the process may have been restarted
        meanwhile."""
