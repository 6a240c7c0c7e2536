"""What recovery needs beyond the other ports."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from virtshim.images.ports import FetchedImage, ImageFiles
from virtshim.model.container import Container
from virtshim.model.ids import ContainerId, ImageDigest, ImageId, SandboxId
from virtshim.model.image import Image
from virtshim.model.sandbox import PodKey, Sandbox
from virtshim.model.vm import OwnedDomain
from virtshim.pods.ports import PodNetworks

# The journal: what is written down of sandboxes, containers and images.

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


class StateRecords(Records, Protocol):
    """Records that may be damaged."""

    def trouble(self) -> str:
        """Why records cannot be written any more, for people; "" if they can, or the disk is only full. From memory, but
        after a write that failed it tries one."""

    def check(self) -> None:
        """Looks whether what is on disk is whole; `trouble` tells."""

    def unreadable(self) -> Mapping[str, str]:
        """Ids of the records that cannot be read, and why. Sandboxes (not ready) and containers (UNKNOWN) among them are
        listed as far as they are known, and stay until somebody removes them."""

    def to_text(self, sandbox: Sandbox, container: Container) -> str:
        """What both records can be made anew from (`RecordCopies`): ASCII, without environment and fetch key."""

    def from_text(self, text: str) -> tuple[Sandbox, Container]:
        """Raises InternalError if it is not that."""


class RecordCopies(Protocol):
    """Each container's records once more, outside of the database, where root alone reads them: annotations, commands and user
    data are in them. A copy goes with its container's directory."""

    def keep(self, container: ContainerId, text: str) -> None:
        """`text`: `StateRecords.to_text`. The container's directory is there. Errors: ResourceExhausted, InternalError."""

    def read(self, container: ContainerId) -> str:
        """ "" if there is none. Errors: InternalError."""


class KnownNetworks(PodNetworks, Protocol):
    """Pod networks that know their pods."""

    def pod_of(self, sandbox: SandboxId, timeout: float) -> PodKey | None:
        """Whose network that is (its attempt is not known, and 0); None if there is none, or it is not whole."""


class KnownImageFiles(ImageFiles, Protocol):
    """Disk files that can be identified."""

    def describe(self, digest: ImageDigest) -> FetchedImage:
        """A stored file without any name. Errors: InvalidRequest, InternalError."""


@dataclass(frozen=True, slots=True)
class DomainInventory:
    """All domains, in one listing. `owned`: this node's. `unreadable`: names of those that may be, but cannot be read.
    `other_nodes`: containers that domains with our mark and another node's id name -> that id; `other_sandboxes` likewise."""

    owned: Sequence[OwnedDomain] = ()
    unreadable: Sequence[str] = ()
    other_nodes: Mapping[ContainerId, str] | None = None
    other_sandboxes: frozenset[SandboxId] = frozenset()


@dataclass(frozen=True, slots=True)
class DomainMetadata:
    """What a domain's definition records of its pod. `title`: `namespace/pod/container`. `fetch_key` "": it has no network.
    `has_run`: it was started at least once. `uid`: as in VmSpec."""

    title: str
    fetch_key: str
    has_run: bool
    uid: int = 0

    def __repr__(self) -> str:  # keeps the key out of logs
        return f"Remembered({self.title!r})"


class VmInventory(Protocol):
    """Errors: as Hypervisor."""

    def take(self) -> DomainInventory:
        """A domain that cannot be read does not prevent the others from being listed."""

    def domain_metadata(self, domain: uuid.UUID) -> DomainMetadata:
        """NotFound if there is no such domain of this node."""

    def take_records_out(self, keep: Callable[[ContainerId, str], None]) -> None:
        """Earlier versions wrote the pod's records into a VM's definition, which every local user may read: each is given to
        `keep` and then removed from there. One that this fails for is logged, and is left for the next time."""
