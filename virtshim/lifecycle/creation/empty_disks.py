"""Step: the empty disks that the pod asks for, in the container's directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from virtshim.domain.container import Container
from virtshim.lifecycle.creation.step import Draft
from virtshim.ports.disks import EmptyDiskFiles
from virtshim.primitives import observed


@dataclass(frozen=True, slots=True)
class EmptyDisks:
    measured_as: ClassVar[observed.Step] = observed.Step.EMPTY_DISKS
    disks: EmptyDiskFiles

    def make(self, draft: Draft) -> Draft:
        """Behind the seed, whose place in the guest is known."""
        for wanted in draft.container.spec.empty_disks:
            draft = draft.with_disk(self.disks.create(draft.container.id, wanted))
        return draft

    def undo(self, container: Container) -> None:
        """They lie in the container's directory, which goes with the root disk."""
