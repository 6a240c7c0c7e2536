"""Step: the devices that the container was granted are taken from the host's drivers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from virtshim.domain.container import Container
from virtshim.lifecycle.creation.step import Draft
from virtshim.passthrough.borrowing import BorrowedDevices
from virtshim.primitives import observed


@dataclass(frozen=True, slots=True)
class HostDevices:
    measured_as: ClassVar[observed.Step] = observed.Step.DEVICES
    borrowed: BorrowedDevices

    def make(self, draft: Draft) -> Draft:
        self.borrowed.take(draft.container.granted)
        return draft

    def undo(self, container: Container) -> None:
        """They are the container's for as long as its record claims them: `ContainerRecords.forget` gives them back."""
