"""The journal: what is written down of sandboxes, containers and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from virtshim.domain.container import Container
from virtshim.domain.ids import ContainerId, ImageId, SandboxId
from virtshim.domain.image import Image
from virtshim.domain.sandbox import Sandbox

K_contra = TypeVar("K_contra", contravariant=True)


R = TypeVar("R")


class Table(Protocol[K_contra, R]):
    """One kind of record, by id. Every change is on disk when the call returns; without `survives_power_cuts` it outlives this
    process, and the machine's end once a later change is on disk. Reads come from memory and are cheap."""

    def add(self, record: R, *, survives_power_cuts: bool = True) -> None:
        """Raises AlreadyExists for a taken id or name."""

    def replace(self, record: R, *, survives_power_cuts: bool = True) -> None:
        """Raises NotFound if the row is gone."""

    def put(self, record: R) -> None:
        """Adds or replaces."""

    def delete(self, key: K_contra) -> None: ...

    def get(self, key: K_contra) -> R | None: ...

    def all(self) -> Sequence[R]:
        """In order of creation."""


class Records(Protocol):
    """The journal. Errors: ResourceExhausted (disk full), InternalError; WrongState for a container with another's claim."""

    @property
    def sandboxes(self) -> Table[SandboxId, Sandbox]: ...

    @property
    def containers(self) -> Table[ContainerId, Container]: ...

    @property
    def images(self) -> Table[ImageId, Image]: ...
