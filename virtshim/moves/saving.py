"""Saves the memory of a VM when its container is stopped, so that the VM's next pod continues with the memory.

virtshim pauses the VM, writes the memory, and then writes the VM's record. From that write on the state counts, and this guest
never runs again. If a step before that write fails, the guest runs on and shuts down as usual. The container's record notes
the save before the first step, so that the next process either finishes the save or resumes the VM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.containers.record_exit import ExitRecorder
from virtshim.guest.ports import GuestOperations
from virtshim.logs.ports import EntrypointLogs
from virtshim.model.container import Container, ContainerPhase, Exit, ExitReason
from virtshim.model.errors import Aborted, DeadlineExceeded, InternalError, ResourceExhausted, ShimError
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.layout import Layout, directories_of
from virtshim.model.sandbox import owner_of
from virtshim.model.vm import Power
from virtshim.moves.fingerprints import Fingerprint
from virtshim.moves.ports import SavedVms, StateVolumes
from virtshim.moves.values import Arrival, SavedLimits, SavedState, VmRecord
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.live import Live
from virtshim.system.locks import PodLocks, new_lock
from virtshim.vm.ports import Hypervisor, MemoryStreams, VmPausing

log = structlog.get_logger(__name__)

# Seconds for the guest to write its caches to its disks. The saved memory has them, too. If the memory is lost, the disk is
# complete.
_SYNC: Final = 2.0
# Bytes that stay free on the file system, beside the memory.
_MARGIN: Final = 64 << 20
# The exit code of a command that SIGTERM ended. A Job must not count a saved container as completed.
SAVED_CODE: Final = 143


@dataclass(slots=True)
class SaveVm:
    records: Records
    vms: SavedVms
    hypervisor: Hypervisor
    pausing: VmPausing
    guests: GuestOperations
    logs: EntrypointLogs
    exits: ExitRecorder
    clock: Clock
    locks: PodLocks
    limits: Live[SavedLimits]
    state_volumes: StateVolumes
    streams: MemoryStreams
    layout: Layout
    # The bytes that each save under way may still write.
    _under_way: dict[ContainerId, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=new_lock)

    def save(
        self,
        container: Container,
        timeout: float,
        *,
        by_operator: bool = False,
        hurry: threading.Event | None = None,
    ) -> None:
        """Returns when the state is on disk and the VM has ended. `timeout` is for the writing, which `hurry` ends at once.
        After any error the guest runs on, unless its state counts already: then a repeated call ends it."""
        with self.alone(container.id) as is_alone:
            if not is_alone:
                raise Aborted(f"container {container.id} is being saved already; wait for it")
            state = self.state_of(container, timeout, by_operator=by_operator, hurry=hurry)
            self.end(container, state)

    def state_of(
        self,
        container: Container,
        timeout: float,
        *,
        by_operator: bool,
        renewing: bool = False,
        hurry: threading.Event | None = None,
    ) -> SavedState:
        """Like `save`, and leaves the VM paused. The caller holds `alone`."""
        until = self.clock.monotonic() + timeout
        vm = self.vm(container)
        if (state := vm.state_left_by(container.id)) is not None:
            return state
        if container.status.saving:  # another process began it
            self.go_on(container)
        self._refuse_without_room(container, vm)
        self._sync(container, min(_SYNC, timeout / 2), hurry or threading.Event())
        self.begin(container, renewing=renewing)
        try:
            disks = self._write(container, vm.disk, until, hurry)
            with self.locks.held(container.sandbox_id), self.locks.held_for_all(owner_of(vm.disk)):
                return self._commit(container, vm.disk, disks, by_operator=by_operator, renewing=renewing)
        except ShimError:
            self.go_on(container)
            raise

    def finish_leftover(self, container: Container) -> None:
        """Finishes a save that another process began: ends the VM if its state counts, else resumes it."""
        with self.alone(container.id) as is_alone:
            now = self.records.containers.get(container.id)
            if not is_alone or now is None or not now.status.saving or now.status.renewing:
                return
            vm = self.vm(now)
            if (state := vm.state_left_by(now.id)) is not None:
                self.end(now, state)
            else:
                self.go_on(now)

    def publish(self, sandbox: SandboxId, seconds: float) -> None:
        """Copies the VMs of a stopped pod to their state volumes, which kubelet unmounts afterwards. Repeatable. Raises ShimError
        while a copy may still succeed. `seconds`: how long it waits for a copy that an earlier call makes."""
        until = self.clock.monotonic() + seconds
        for one in self.records.containers.all():
            if one.sandbox_id == sandbox and one.spec.state_volume:
                self.vms.get(one.spec.pod_disk)  # raises if the record cannot be read, which `all` leaves out
        for vm in self.vms.all():
            if vm.volume.sandbox == sandbox:
                with self.locks.held_soon(owner_of(vm.disk), until - self.clock.monotonic()) as held:
                    if not held:
                        raise DeadlineExceeded(
                            f"virtual machine {vm.readable} is still being copied to its state volume; repeat the call"
                        )
                    self._publish(vm.disk, sandbox)

    def _publish(self, disk: str, sandbox: SandboxId) -> None:
        vm = self.vms.get(disk)
        if vm is None or vm.volume.sandbox != sandbox:
            return
        try:
            self.state_volumes.publish(disk)
        except Aborted as exc:  # the volume is no longer this node's to write to
            log.warning("vm.not_published", vm=vm.readable, error=str(exc))
            return
        log.info("vm.published", vm=vm.readable)

    def expire(self) -> None:
        """Discards states that are too old or used up, memory files without a state, and files that a state volume has. Leaves
        out VMs that another call works on."""
        for vm in self.vms.all():
            # No new container takes it, and nobody removes the VM.
            with self.locks.held_soon(owner_of(vm.disk), 0) as held:
                if held:
                    try:
                        self._discard_spent(vm.disk)
                    except ShimError as exc:
                        log.warning("vm.state.not_discarded", vm=vm.readable, error=str(exc))

    def _discard_spent(self, disk: str) -> None:
        vm = self.vms.get(disk)
        users = [one for one in self.records.containers.all() if one.spec.pod_disk == disk]
        if vm is None or any(one.status.saving or one.status.arriving for one in users if one.is_running):
            return
        is_used = any(one.phase is not ContainerPhase.EXITED for one in users)
        now, published_at = self.clock.now_ns(), vm.volume.published_at
        if published_at and not is_used and now > self.limits.now.until(published_at):
            self.vms.put(vm.forgotten())  # the volume's copy counts from here on, however much a kill leaves
            self.vms.forget(disk)
            log.info("vm.forgotten", vm=vm.readable)
            return
        if vm.arrival is not None:
            self._forget_unless_used(vm, vm.arrival, is_used=is_used)
            return
        if vm.saved is None:
            self.vms.discard(disk)
            return
        taken_by = vm.saved.taken_by
        taker = self.records.containers.get(taken_by) if taken_by is not None else None
        over = (ContainerPhase.RUNNING, ContainerPhase.EXITED)
        is_used_up = taken_by is not None and (taker is None or taker.phase in over)
        if is_used_up or (not is_used and now > self.limits.now.until(vm.saved.saved_at)):
            without = vm.with_state(None) if is_used_up else vm.lapsed(now)
            try:
                self.vms.put(without)
            except ResourceExhausted:  # the memory makes room; a state without memory cannot be restored
                self.vms.discard(disk)
                self.vms.put(without)
            self.vms.discard(disk)
            log.info("vm.state.discarded", vm=vm.readable, saved_at=vm.saved.saved_at, used_up=is_used_up)

    def _forget_unless_used(self, vm: VmRecord, arrival: Arrival, *, is_used: bool) -> None:
        """Forgets a VM that did not arrive, because nothing of it is here. The next pod that wants the VM asks for it again."""
        if is_used or arrival.state is not None:
            return
        if vm.departure is not None:
            self.vms.put(dataclasses.replace(vm, arrival=None))
        else:
            self.vms.forget(vm.disk)

    @contextlib.contextmanager
    def alone(self, container: ContainerId) -> Iterator[bool]:
        """Yields False if another thread of this process saves or renews the VM."""
        with self._lock:
            is_alone = container not in self._under_way
            self._under_way.setdefault(container, 0)
        try:
            yield is_alone
        finally:
            if is_alone:
                with self._lock:
                    del self._under_way[container]

    def vm(self, container: Container) -> VmRecord:
        vm = self.vms.get(container.spec.pod_disk)
        if vm is None:
            raise InternalError(f"the record of virtual machine {container.spec.vm} is gone")
        return vm

    def _refuse_without_room(self, container: Container, vm: VmRecord) -> None:
        """Also reserves the room, because a node that shuts down saves all its VMs at once. Raises ResourceExhausted."""
        size = container.status.size
        need = max(size.memory_bytes, size.max_memory_bytes)
        others = sum(one.saved.bytes for one in self.vms.all() if one.saved is not None and one.disk != vm.disk)
        with self._lock:
            reserved = sum(self._under_way.values())
            if (free := self.vms.free_bytes() - reserved) < need + _MARGIN:
                raise ResourceExhausted(
                    f"the guest has {need} bytes of memory, and {free} are free below paths.state_dir"
                )
            if (most := self.limits.now.most) and others + reserved + need > most:
                raise ResourceExhausted(
                    f"the guest has {need} bytes of memory, other saved VMs have {others + reserved}, and saved.max_bytes "
                    f"allows {most}"
                )
            self._under_way[container.id] = need

    def _sync(self, container: Container, seconds: float, hurry: threading.Event) -> None:
        try:
            code, said = self.guests.run_script(container.id, "sync", (), b"", seconds, hurry)
        except ShimError as exc:
            code, said = -1, str(exc)
        if code:
            log.info("vm.not_synced", container=container.id.short, why=said or f"sync ended with {code}")

    def begin(self, container: Container, *, renewing: bool = False) -> None:
        """Notes in the record that the guest may be paused. The caller holds `alone`. Raises Aborted if another action on the
        guest is under way."""
        disk = container.spec.pod_disk
        with self.locks.held(container.sandbox_id), self.locks.held_for_all(owner_of(disk)):
            found = self.records.containers.get(container.id)
            if found is None or not found.is_running:
                raise Aborted(f"container {container.id} has ended")
            status = found.status
            if status.ending is not None and status.ending.reason is not ExitReason.SAVED:
                raise Aborted(f"container {container.id} is ending")
            if status.checkpointing:
                raise Aborted(f"a checkpoint of container {container.id} is being written")
            if status.paused:
                raise Aborted(f"container {container.id} is paused")
            if status.frozen:
                raise Aborted(f"the file systems of container {container.id} are frozen")
            self.records.containers.replace(found.arrived().with_saving(saving=True, renewing=renewing))

    def _write(
        self, container: Container, disk: str, until: float, hurry: threading.Event | None
    ) -> Mapping[str, Fingerprint]:
        """Pauses the guest and writes its memory. Returns the fingerprints of its disks."""
        own = container.id
        self.pausing.pause(container.domain_uuid, own)
        path = self.vms.begin(disk)
        left = max(0.1, until - self.clock.monotonic())
        self.pausing.save_memory(container.domain_uuid, path, left, own, hurry)
        self.vms.flush(disk)  # takes long, so without a lock
        left = max(0.1, until - self.clock.monotonic())
        return self.vms.fingerprints(container, left, hurry or threading.Event())

    def _commit(
        self,
        container: Container,
        disk: str,
        disks: Mapping[str, Fingerprint],
        *,
        by_operator: bool,
        renewing: bool,
    ) -> SavedState:
        """Writes the VM's record, which makes the state count. Nobody else can end this container, or start the VM's next one,
        while the caller holds both locks."""
        now, vm = self.stopped(container), self.vm(container)
        state = dataclasses.replace(
            self.left_by(now, vm), bytes=self.vms.finish(disk), by_operator=by_operator, renewing=renewing, disks=disks
        )
        try:
            self.vms.put(vm.with_state(state))
        except ShimError:
            # The record may be on disk despite the error. If this fails, too, the guest stays paused: its state may count.
            self.vms.put(vm.with_state(None))
            raise
        with self._lock:
            self._under_way[container.id] = 0  # the state counts from here on
        if not renewing:  # within the lock: whoever finds a QEMU that was killed meanwhile must not call it crashed
            self.records.containers.replace(now.with_ending(saved_exit(state)))
        return state

    def stopped(self, container: Container) -> Container:
        """The record of a container whose guest is paused to be saved or moved. Raises Aborted if anything has changed that.
        The caller holds the locks of pod and VM."""
        now = self.records.containers.get(container.id)
        if now is None or not now.is_running or not now.status.saving:
            raise Aborted(f"container {container.id} ended while its memory was written")
        if now.status.ending is not None and now.status.ending.reason is not ExitReason.SAVED:
            raise Aborted(f"container {container.id} is ending")
        if self.hypervisor.power(container.domain_uuid).power is not Power.PAUSED:
            raise Aborted(f"the guest of container {container.id} was resumed while its memory was written")
        return now

    def left_by(self, container: Container, vm: VmRecord) -> SavedState:
        """What the container leaves to the next one, without its memory and its disks."""
        return SavedState(
            container=container.id,
            sandbox=container.sandbox_id,
            saved_at=self.clock.now_ns(),
            bytes=0,
            known_as=container.guest_id,
            command_begun=container.status.command_begun,
            read_to=self.logs.read_to(container.id),
            user=container.status.user,
            addresses=vm.addresses,
            directories=directories_of(self.layout, container.id, vm.disk),
        )

    def end(self, container: Container, state: SavedState) -> None:
        """Ends the VM whose state counts."""
        self.exits.begin_end(container.id, saved_exit(state))
        self.hypervisor.destroy(container.domain_uuid, container.id)
        self.exits.record_if_ended(container.id)
        log.info("vm.saved", container=container.id.short, vm=container.spec.vm, bytes=state.bytes)

    def go_on(self, container: Container) -> None:
        """Resumes the guest after a failed save. Raises InternalError if the state may count. Does nothing if the container has
        ended, because the VM and the memory file may belong to the next container."""
        with self.locks.held(container.sandbox_id):
            found, vm = self.records.containers.get(container.id), self.vm(container)
            if found is None or not found.is_running or not found.status.saving:
                return
            if vm.state_left_by(container.id) is not None or not vm.is_here:
                raise InternalError(
                    f"the state of virtual machine {container.spec.vm} may count; its guest stays paused"
                )
            with contextlib.suppress(ShimError):  # the guest of a move whose process was killed; else there is none
                self.streams.cancel(container.domain_uuid, container.id)
            self.pausing.resume(container.domain_uuid, container.id)
            self.records.containers.replace(found.with_saving(saving=False))
            self.vms.discard(vm.disk)


def saved_exit(state: SavedState) -> Exit:
    who = "container" if state.by_operator else "pod"
    message = f"the guest's memory was saved ({state.bytes >> 20} MiB); its next {who} continues from there"
    return Exit(SAVED_CODE, ExitReason.SAVED, state.saved_at, message)
