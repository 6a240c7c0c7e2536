"""CheckpointContainer: writes the memory and the disk of a running VM into one archive. The VM keeps running.

virtshim pauses the VM while it writes the memory and copies the disk, so that both show the same moment. It builds the
archive after the VM has resumed. Before the pause, virtshim asks the guest to freeze its file systems, so that the disk
alone is consistent too. The record notes the checkpoint first: if virtshim dies in between, the next process resumes
the VM.
"""

from __future__ import annotations

import contextlib
import json
import os.path
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.guest.freeze import GuestFreezer
from virtshim.model.container import Container
from virtshim.model.deadline import Deadline
from virtshim.model.errors import Aborted, DeadlineExceeded, ShimError, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout, root_disk_of
from virtshim.pods.lookup import existing_container
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks, new_lock
from virtshim.vm.ports import CheckpointFiles, VmPausing

log = structlog.get_logger(__name__)

_FORMAT: Final = 1
_MEMORY: Final = "memory.save"
_DISK: Final = "root.qcow2"
_SEED: Final = "seed.iso"


@dataclass(slots=True)
class _Work:
    """`is_paused`: this checkpoint has paused the VM and not resumed it yet. `frozen_file_systems`: how many the guest
    froze."""

    container: Container
    location: str
    deadline: Deadline
    is_paused: bool = False
    frozen_file_systems: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointContainer:
    records: Records
    pausing: VmPausing
    files: CheckpointFiles
    layout: Layout
    clock: Clock
    locks: PodLocks
    freezer: GuestFreezer
    _lock: threading.Lock = field(default_factory=new_lock)
    _under_way: set[ContainerId] = field(default_factory=set)

    def checkpoint(self, wanted: Container, location: str, deadline: Deadline) -> None:
        """`location`: the absolute path of the archive. Errors: InvalidRequest (location), NotFound, WrongState (not
        running, or paused), Aborted (another checkpoint is under way, or the VM ended), DeadlineExceeded,
        ResourceExhausted. An error leaves no files behind, and the VM keeps running."""
        with self._alone(wanted.id) as is_alone:
            if not is_alone:
                raise Aborted(f"a checkpoint of container {wanted.id} is already being written; wait for it")
            work = _Work(self._begin(wanted, location), location, deadline)
            try:
                self._write(work)
            finally:
                self._tidy(work.container, was_paused=work.is_paused)
        log.info("container.checkpointed", container=wanted.id.short, location=location)

    def finish_leftover(self, container: Container) -> None:
        """Cleans up the checkpoint that another process or a failed clean-up left unfinished."""
        with self._alone(container.id) as is_alone:
            now = self.records.containers.get(container.id)
            if not is_alone or now is None:
                return
            if now.status.checkpointing:
                self._tidy(now, was_paused=True)
            elif now.status.frozen and not self.freezer.is_held(now.id):
                self.freezer.after_resume(now.id)

    @contextlib.contextmanager
    def _alone(self, container: ContainerId) -> Iterator[bool]:
        with self._lock:
            is_alone = container not in self._under_way
            self._under_way.add(container)
        try:
            yield is_alone
        finally:
            if is_alone:
                with self._lock:
                    self._under_way.discard(container)

    def _begin(self, wanted: Container, location: str) -> Container:
        with self.locks.held(wanted.sandbox_id):
            container = existing_container(self.records, wanted.id)
            if container.status.checkpointing:
                raise Aborted(f"an earlier checkpoint of container {container.id} is not yet cleaned up; try again")
            if container.unusable:
                raise Aborted(f"container {container.id} {container.unusable}")
            if not container.is_running:
                raise WrongState(
                    f"container {container.id} is {container.phase.value}: only a running container has state"
                )
            if container.status.paused:
                raise WrongState(f"container {container.id} is paused by an operator; `virtshim resume` first")
            if self.freezer.is_held(container.id):
                raise WrongState(f"the file systems of container {container.id} are frozen; `virtshim thaw` first")
            if container.granted.passthrough:
                raise WrongState(
                    f"container {container.id} has host devices ({', '.join(container.granted.claims)}), whose state "
                    "cannot be saved"
                )
            if container.granted.root_volume is not None:
                raise WrongState(
                    f"container {container.id} runs on a volume ({container.granted.root_volume.host_path}), which a "
                    "checkpoint does not save; take a snapshot in the storage"
                )
            if container.spec.empty_disks:
                raise WrongState(
                    f"container {container.id} has disks beside its root disk ({container.spec.empty_disks[0].field_name()}), "
                    "which a checkpoint does not save"
                )
            if container.spec.volumes:
                raise WrongState(
                    f"container {container.id} has volumes ({container.spec.volumes[0].guest}), whose state cannot be saved"
                )
            container = container.with_checkpoint(location)
            self.records.containers.replace(container)
            return container

    def _write(self, work: _Work) -> None:
        """Runs without the pod's lock, so that StopContainer need not wait. StopContainer then ends the VM, and this
        call fails."""
        container, clock = work.container, self.clock

        def check() -> None:
            if not work.deadline.left(clock.monotonic()):
                raise DeadlineExceeded(f"the checkpoint of container {container.id} took too long; allow it more time")

        directory = self.files.begin(work.location, container.id)
        domain = container.domain_uuid
        check()
        work.frozen_file_systems = self.freezer.freeze(container)
        self.pausing.pause(domain)
        work.is_paused = True
        began = clock.monotonic()
        self.pausing.save_memory(domain, os.path.join(directory, _MEMORY), work.deadline.left(began))
        self.files.copy(root_disk_of(self.layout, container), os.path.join(directory, _DISK), check)
        self.pausing.resume(domain)
        work.is_paused = False
        self.freezer.after_resume(container.id)
        seconds = round(clock.monotonic() - began, 3)
        log.info(
            "vm.stood_still",
            container=container.id.short,
            seconds=seconds,
            frozen_file_systems=work.frozen_file_systems,
        )
        self.files.copy(self.layout.seed_iso(container.id), os.path.join(directory, _SEED), check)
        self.files.finish(work.location, container.id, self._manifest(container, work.frozen_file_systems), check)

    def _tidy(self, container: Container, *, was_paused: bool) -> None:
        """Updates the record last: while it names a checkpoint, `virtshim.recovery.watch_pods` repeats the clean-up."""
        try:
            now = self.records.containers.get(container.id)
            if was_paused and (now is None or not now.status.saving):  # the guest of a saved state never runs again
                self.pausing.resume(container.domain_uuid, container.id)
            self.freezer.after_resume(container.id, was_paused=was_paused)
            self.files.discard(container.status.checkpointing, container.id)
            with self.locks.held(container.sandbox_id):
                now = self.records.containers.get(container.id)
                if now is not None:
                    self.records.containers.replace(now.with_checkpoint(""))
        except ShimError as exc:
            log.warning("checkpoint.not_tidied", container=container.id.short, error=str(exc))

    def _manifest(self, container: Container, frozen_file_systems: int) -> bytes:
        """Describes the archive: which container, and the names of the files. docs/operate.md explains the files."""
        sandbox = self.records.sandboxes.get(container.sandbox_id)
        facts = {
            "format": _FORMAT,
            "writtenAt": self.clock.now_ns(),
            "pod": {"namespace": sandbox.key.namespace, "name": sandbox.key.name, "uid": sandbox.key.uid}
            if sandbox
            else None,
            "container": {"id": container.id.value, "name": container.name.name, "attempt": container.name.attempt},
            "image": {"digest": container.image.value, "reference": container.spec.image_ref},
            "domain": container.spec.domain_uuid,
            "memory": _MEMORY,
            "rootDisk": _DISK,
            "seed": _SEED,
            "frozenFileSystems": frozen_file_systems,
        }
        return json.dumps(facts, indent=2).encode() + b"\n"
