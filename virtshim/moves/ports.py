"""Ports to VMs that outlive their pods."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from virtshim.model.container import Container
from virtshim.model.ids import SandboxId
from virtshim.moves.fingerprints import Fingerprint
from virtshim.moves.values import Brought, VmRecord

PATIENCE: Final = 30.0
"""Seconds without any progress after which a volume counts as hung."""


class SavedVms(Protocol):
    """One directory for each VM, with its record, its root disk, and its guest's saved memory. Errors: InternalError,
    ResourceExhausted (the disk is full)."""

    def get(self, disk: str) -> VmRecord | None:
        """None if there is no such VM. An unreadable record is an error, never an absent one."""

    def all(self, *, strict: bool = False) -> Sequence[VmRecord]:
        """By name. The log names those that cannot be read; with `strict` they are an error."""

    def put(self, vm: VmRecord) -> None:
        """Adds or replaces the record. It is on disk on return."""

    def begin(self, disk: str) -> str:
        """The path to write the memory to. No file is there."""

    def flush(self, disk: str) -> None:
        """Syncs the written memory. It does not count as the VM's saved memory yet."""

    def finish(self, disk: str) -> int:
        """Makes the written memory the VM's saved memory, durably. Returns its size in bytes."""

    def fingerprints(
        self, container: Container, seconds: float, leave_off: threading.Event
    ) -> Mapping[str, Fingerprint]:
        """The fingerprints of the disks of the container's VM, which is off, by their paths in the pod; "" for the root disk.
        `leave_off`: set when the caller gives up. Raises Unavailable (also for a volume that does not answer within `seconds`),
        Aborted (the caller gave up)."""

    def root_fingerprint(self, disk: str) -> Fingerprint:
        """The fingerprint of the root disk alone. Raises Unavailable."""

    def memory(self, disk: str) -> str:
        """The path of the saved memory."""

    def discard(self, disk: str) -> None:
        """Removes the memory, even if it is half written. No error if there is none."""

    def forget(self, disk: str) -> None:
        """Removes the VM's directory, its record last. Call `RootDisks.delete_pod_disks` first. No error if it is gone."""

    def disk_bytes(self, disk: str) -> int:
        """The bytes that the root disk takes on the node; 0 if there is none."""

    def free_bytes(self) -> int:
        """The bytes that are free for memory."""


class StateVolumes(Protocol):
    """Volumes of pods. When a pod has stopped, its VM is copied to its volume. `volume`: its path on the node. `disk`: the name
    of the VM's root disk. `leave_off`: set when the caller gives up. Errors: WrongState (the volume has something that must not
    be used, or this node has no key), Unavailable (the volume cannot be read or written, or does not answer), ResourceExhausted
    (the volume or this node's disk is full), Aborted (the caller gave up)."""

    def check(self) -> None:
        """Raises WrongState if this node has no key."""

    def macs(self, namespace: str, vm: str) -> Mapping[str, str]:
        """The MACs of a VM's NICs, by the name of the interface in the pod. They are the same on every node of the cluster,
        because a saved guest keeps its MACs. Empty if this node has no key."""

    def bring(self, volume: str, disk: str, vm: str, leave_off: threading.Event) -> Brought:
        """Copies the VM's files from the volume, if this node's files are older. `vm`: as `VmRecord.readable`. The caller holds
        the VM's lock, and the VM is off. Repeatable after a crash at any step. Returns what a new record of the VM must say."""

    def start(self, volume: str, disk: str, sandbox: SandboxId, leave_off: threading.Event) -> VmRecord:
        """Counts a start of the VM, before its guest runs. The caller holds the VM's lock. Returns the VM's record. Raises
        Aborted if another node has started the VM since `bring`."""

    def publish(self, disk: str) -> None:
        """Copies the files of a VM that is off to the volume of its last start. The caller holds the VM's lock. Repeatable.
        Raises Aborted if that volume is not there, if another node has started the VM since, or if tenants' files are in the
        way."""
