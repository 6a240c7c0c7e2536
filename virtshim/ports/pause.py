"""Pausing and resuming VMs, and checkpoints of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Protocol

from virtshim.domain.ids import ContainerId


class VmPausing(Protocol):
    """Pauses and resumes VMs. Errors: as Hypervisor; DeadlineExceeded, within seconds, if its QEMU does not answer."""

    def pause(self, domain: uuid.UUID) -> None:
        """WrongState if it is not running. After any error it is not paused, or not for long."""

    def resume(self, domain: uuid.UUID) -> None:
        """A paused one goes on; a write that failed is tried again. No error if it is not paused, off or gone."""

    def out_of_space(self, domain: uuid.UUID) -> bool:
        """Whether it is paused because there was no room for its disk, and for no other reason."""

    def save_memory(self, domain: uuid.UUID, path: str, timeout: float) -> None:
        """Writes memory and devices of a VM that we paused to the new file `path`, root's alone, as `virsh save` does. It
        stays paused. DeadlineExceeded if it takes longer than `timeout`, Aborted if the VM ends meanwhile; then no
        file is left."""


class CheckpointFiles(Protocol):
    """Archives of checkpoints, and the directory that each is gathered in beside it. All is root's alone. Errors:
    InvalidRequest (no place for an archive), ResourceExhausted (no room), InternalError. `check` is called now and then and
    may raise, to end it."""

    def begin(self, location: str, container: ContainerId) -> str:
        """An empty directory, its path. InvalidRequest unless `location` is absolute and in a directory that is there."""

    def copy(self, source: str, target: str, check: Callable[[], None]) -> None:
        """A copy that shares blocks where the file system can."""

    def finish(self, location: str, container: ContainerId, manifest: bytes, check: Callable[[], None]) -> None:
        """All files of the directory, and the manifest first, as one tar file at `location`: whole or not at all."""

    def discard(self, location: str, container: ContainerId) -> None:
        """Removes the directory; the archive stays if it was finished."""
