"""Ports of the records, and of what recovery reads to rebuild them."""

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

K_contra = TypeVar("K_contra", contravariant=True)
R = TypeVar("R")


class Table(Protocol[K_contra, R]):
    """One kind of record, by id. A change is on disk when the call returns. Without `survives_power_cuts` it is only sure to
    survive this process; it survives a power cut once a later change has been synced. Reads come from memory and are cheap."""

    @property
    def generation(self) -> int:
        """A number that grows after each change. Results that were computed from records stay right while the
        generation equals the one that was read before the records."""

    def add(self, record: R, *, survives_power_cuts: bool = True) -> None:
        """Raises AlreadyExists for a taken id or name."""

    def replace(self, record: R, *, survives_power_cuts: bool = True) -> None:
        """Raises NotFound if the row is gone."""

    def put(self, record: R) -> None:
        """Adds or replaces the record."""

    def delete(self, key: K_contra) -> None: ...

    def get(self, key: K_contra) -> R | None: ...

    def all(self) -> Sequence[R]:
        """In order of creation."""


class Records(Protocol):
    """The journal. Errors: ResourceExhausted (disk full), InternalError; WrongState if another container holds a claim."""

    @property
    def sandboxes(self) -> Table[SandboxId, Sandbox]: ...

    @property
    def containers(self) -> Table[ContainerId, Container]: ...

    @property
    def images(self) -> Table[ImageId, Image]: ...


class StateRecords(Records, Protocol):
    """Records that may be damaged."""

    def trouble(self) -> str:
        """Why records cannot be written, in words for the operator; "" if they can be, or if the disk is merely full. If the last
        write failed, it tries another one; else it answers from memory."""

    def check(self) -> None:
        """Verifies the file on disk. `trouble` reports the result."""

    def unreadable(self) -> Mapping[str, str]:
        """Id of each unreadable record -> the reason. Where the row's columns allow it, unreadable sandboxes are listed as not
        ready and unreadable containers as UNKNOWN, until somebody removes them."""

    def to_text(self, sandbox: Sandbox, container: Container) -> str:
        """Both records as ASCII, for `RecordCopies`. Omits environment and fetch key."""

    def from_text(self, text: str) -> tuple[Sandbox, Container]:
        """The inverse of `to_text`. Raises InternalError if `text` is malformed."""


class RecordCopies(Protocol):
    """Copies of each container's records outside the database. Only root can read them, because they hold annotations, commands
    and user data. A copy is deleted with its container's directory."""

    def keep(self, container: ContainerId, text: str) -> None:
        """Writes `text`, made by `StateRecords.to_text`. The container's directory must exist. Errors: ResourceExhausted,
        InternalError."""

    def read(self, container: ContainerId) -> str:
        """ "" if there is no copy. Errors: InternalError."""


class KnownNetworks(PodNetworks, Protocol):
    """Pod networks that know their pods."""

    def pod_of(self, sandbox: SandboxId, timeout: float) -> PodKey | None:
        """The pod that owns this network, with attempt 0, because the network does not record the attempt. None if there is no
        network or it is incomplete."""


class KnownImageFiles(ImageFiles, Protocol):
    """Disk files that can be identified."""

    def describe(self, digest: ImageDigest) -> FetchedImage:
        """Describes a stored file, without its names. Errors: InvalidRequest, InternalError."""


@dataclass(frozen=True, slots=True)
class DomainInventory:
    """All domains, in one listing. `owned`: this node's. `unreadable`: names of domains that may be this node's but cannot be
    read. `other_nodes`: containers of domains that have our mark but another node's id -> that id. `other_sandboxes`: the
    sandboxes of those domains."""

    owned: Sequence[OwnedDomain] = ()
    unreadable: Sequence[str] = ()
    other_nodes: Mapping[ContainerId, str] | None = None
    other_sandboxes: frozenset[SandboxId] = frozenset()


@dataclass(frozen=True, slots=True)
class DomainMetadata:
    """What a domain's definition says about its pod. `title`: `namespace/pod/container`. `fetch_key`: "" without a network.
    `has_run`: the VM was started at least once. `uid`: as in VmSpec."""

    title: str
    fetch_key: str
    has_run: bool
    uid: int = 0

    def __repr__(self) -> str:  # keeps the key out of logs
        return f"DomainMetadata({self.title!r})"


class VmInventory(Protocol):
    """Errors: as Hypervisor."""

    def take(self) -> DomainInventory:
        """An unreadable domain does not keep the others from being listed."""

    def domain_metadata(self, domain: uuid.UUID) -> DomainMetadata:
        """Raises NotFound if this node has no such domain."""

    def take_records_out(self, keep: Callable[[ContainerId, str], None]) -> None:
        """Moves records out of VMs' definitions, where earlier versions put them and every local user can read them. Each is
        passed to `keep`, then removed from the definition. A failure is logged; the next call tries again."""
