"""What recovery needs beyond the other ports."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from virtshim.domain.container import Container
from virtshim.domain.ids import ContainerId, ImageDigest, SandboxId
from virtshim.domain.sandbox import PodKey, Sandbox
from virtshim.domain.vm import OwnedDomain
from virtshim.ports.images import FetchedImage, ImageFiles
from virtshim.ports.network import PodNetworks
from virtshim.ports.records import Records


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
        """What a VM carries so that both records can be made anew: ASCII, without secrets."""

    def from_text(self, text: str) -> tuple[Sandbox, Container]:
        """Raises InternalError if it is not that."""


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
    """What a domain's definition records of its pod. `record`: as in VmSpec, "" in those of earlier versions. `title`:
    `namespace/pod/container`. `fetch_key` "": it has no network. `has_run`: it was started at least once."""

    record: str
    title: str
    fetch_key: str
    has_run: bool

    def __repr__(self) -> str:  # keeps the key out of logs
        return f"Remembered({self.title!r})"


class VmInventory(Protocol):
    """Errors: as Hypervisor."""

    def take(self) -> DomainInventory:
        """A domain that cannot be read does not prevent the others from being listed."""

    def domain_metadata(self, domain: uuid.UUID) -> DomainMetadata:
        """NotFound if there is no such domain of this node."""
