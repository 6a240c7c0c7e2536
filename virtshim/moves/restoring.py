"""Continues a saved VM in another sandbox, once.

libvirt loads the memory into a paused VM. Then the VM's record says that the state is used up. Only then the guest runs. So two
guests never continue from one state, and old memory never meets a disk that a guest has written to since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog

from virtshim.containers.logs import ContainerLogs
from virtshim.guest.freeze import GuestFreezer
from virtshim.model.container import Container
from virtshim.model.errors import (
    Aborted,
    DeadlineExceeded,
    NotFound,
    ResourceExhausted,
    ShimError,
    Unavailable,
    WrongState,
)
from virtshim.model.layout import Layout, directories_of
from virtshim.model.sandbox import owner_of
from virtshim.moves.fingerprints import difference
from virtshim.moves.ports import PATIENCE, SavedVms, StateVolumes
from virtshim.moves.values import SavedState, VmRecord, has_new_addresses, restorable
from virtshim.store.ports import RecordCopies, StateRecords
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks
from virtshim.vm.ports import Hypervisor, VmPausing

log = structlog.get_logger(__name__)

# Seconds. A guest's kernel sees within milliseconds that a link has no carrier, unless the node is overloaded.
_UNPLUGGED: Final = 2.0
# Seconds that a start waits for the VM's lock.
_WAIT: Final = 0.2


@dataclass(frozen=True, slots=True)
class RestoreVm:
    records: StateRecords
    vms: SavedVms
    hypervisor: Hypervisor
    pausing: VmPausing
    logs: ContainerLogs
    freezer: GuestFreezer
    copies: RecordCopies
    clock: Clock
    locks: PodLocks
    layout: Layout
    state_volumes: StateVolumes

    def start(self, container: Container, leave_off: threading.Event) -> Container:
        """Starts the container's VM. If the VM has a saved state that this container may continue from, the VM is restored and
        stays paused; otherwise it boots. Returns the container as RUNNING. The caller records it, then calls `go_on`.
        `leave_off`: set when a call waits to end the VM."""
        vm = self._counted(container, leave_off)
        state = restorable(vm, container)
        if vm is None or state is None:
            self._lose(vm, container)  # the guest is about to change the disk that the state belongs to
            self.hypervisor.start(container.domain_uuid, container.id)
            return container.running(self.clock.now_ns())
        self.load(container, vm, state, leave_off)
        restored = continuing(container.running(self.clock.now_ns()), state)
        self.keep_copy(restored)
        return restored

    def _counted(self, container: Container, leave_off: threading.Event) -> VmRecord | None:
        """The record of the container's VM. On a state volume, the start is counted first."""
        spec = container.spec
        if not spec.state_volume:
            return self.vms.get(spec.pod_disk) if spec.vm else None
        # A stop of this container must not wait for a copy: this call has the sandbox's lock.
        with self.locks.held_soon(owner_of(spec.pod_disk), _WAIT) as held:
            if not held:
                raise Unavailable(
                    "another call works on the virtual machine, such as its copy to the state volume; a retry may succeed"
                )
            return self.state_volumes.start(spec.state_volume, spec.pod_disk, spec.sandbox_id, leave_off)

    def load(self, container: Container, vm: VmRecord, state: SavedState, leave_off: threading.Event) -> None:
        """Restores the VM, which stays paused, and records that the state is used up. `leave_off`: as of `start`."""
        memory, moved = self.vms.memory(vm.disk), self._moved(state, container)
        try:
            self._refuse_changed_disks(container, state, leave_off)
            self.hypervisor.restore(container.domain_uuid, container.id, memory, moved)
        except (Unavailable, ResourceExhausted, DeadlineExceeded, NotFound, Aborted):
            raise  # the next attempt may have more luck
        except ShimError:
            self._change(vm.disk, state, dataclasses.replace(state, failed_in=container.sandbox_id))
            raise
        if container.spec.command:  # its output continues where it was read to
            self.logs.entrypoints.write(container.id, (), state.read_to)
        self._change(vm.disk, state, dataclasses.replace(state, taken_by=container.id))

    def _refuse_changed_disks(self, container: Container, state: SavedState, leave_off: threading.Event) -> None:
        if not state.disks:
            return
        if what := difference(state.disks, self.vms.fingerprints(container, PATIENCE, leave_off)):
            raise WrongState(f"the guest's memory no longer fits its disks: {what}; the next attempt boots")

    def go_on(self, container: Container) -> Container:
        """Resumes a restored VM, and removes the state. Returns the container as recorded. Another process may repeat it."""
        if not container.status.arriving or container.status.saving:
            return container
        vm = self.vms.get(container.spec.pod_disk)
        self.resume(container, vm, vm.saved if vm is not None else None)
        return self.arrived(container)

    def arrived(self, container: Container) -> Container:
        """Removes the saved state of a VM that runs already. Returns the container as recorded."""
        now = container.arrived()
        self.records.containers.replace(now)
        try:
            self._drop(self.vms.get(container.spec.pod_disk))
        except ShimError as exc:  # the guest runs; `SaveVm.expire` repeats this
            log.warning("vm.state.not_dropped", container=container.id.short, error=str(exc))
        self.freezer.after_resume(container.id)  # sets its clock
        log.info("vm.restored", container=container.id.short, vm=container.spec.vm)
        return now

    def resume(self, container: Container, vm: VmRecord | None, state: SavedState | None) -> None:
        """Resumes the guest. If the pod has other addresses than the guest, unplugs the guest's links for a moment: a DHCP client
        that watches its link then asks again, even without an agent."""
        if vm is None or state is None or not has_new_addresses(state, vm):
            self.pausing.resume(container.domain_uuid, container.id)
            return
        self._set_links(container, up=False)
        self.pausing.resume(container.domain_uuid, container.id)
        self.clock.wait(threading.Event(), _UNPLUGGED)
        self._set_links(container, up=True)

    def _set_links(self, container: Container, *, up: bool) -> None:
        try:
            self.pausing.set_links(container.domain_uuid, container.id, up=up)
        except ShimError as exc:
            log.warning("vm.links.not_set", container=container.id.short, up=up, error=str(exc))

    def taken(self, container: Container) -> Container | None:
        """For a container that is CREATED in its record while its VM is on. Returns the container as RUNNING: it booted, or
        it took the saved state. Returns None if its VM must not run, because the state still counts."""
        vm = self.vms.get(container.spec.pod_disk) if container.spec.vm else None
        if vm is not None and not vm.is_here:
            return None
        state = vm.saved if vm is not None else None
        running = container.running(self.clock.now_ns())
        if state is None:
            return running  # it booted
        return continuing(running, state) if state.taken_by == container.id else None

    def _lose(self, vm: VmRecord | None, container: Container) -> None:
        state = vm.saved if vm is not None else None
        if state is not None and state.taken_by is None:
            again = "a restart in the same sandbox boots"
            why = again if state.failed_in is None else "it could not be restored"
            log.warning("vm.state.lost", container=container.id.short, vm=container.spec.vm, why=why)
            self._note(container, f"virtshim: the guest boots, and its saved memory is discarded: {why}")
        elif vm is not None and vm.lapsed_at:
            at = datetime.fromtimestamp(vm.lapsed_at / 10**9, UTC).isoformat(timespec="seconds")
            self._note(
                container, f"virtshim: the guest boots: its saved memory was discarded at {at}, after saved.keep"
            )
        elif vm is not None and vm.lost:
            log.warning("vm.state.lost", container=container.id.short, vm=container.spec.vm, why=vm.lost)
            self._note(container, f"virtshim: the guest boots: {vm.lost}")
        self._drop(vm)

    def _note(self, container: Container, text: str) -> None:
        with contextlib.suppress(ShimError):
            self.logs.note(container, text)

    def _drop(self, vm: VmRecord | None) -> None:
        if vm is None:
            return
        with self.locks.held_for_all(owner_of(vm.disk)):
            now = self.vms.get(vm.disk)
            if now is not None and now != now.booted():
                self.vms.put(now.booted())
            self.vms.discard(vm.disk)

    def _change(self, disk: str, before: SavedState, now: SavedState) -> None:
        """Raises Aborted if the state is not what it was."""
        with self.locks.held_for_all(owner_of(disk)):
            vm = self.vms.get(disk)
            if vm is None or vm.saved != before:
                raise Aborted("the saved state of the virtual machine has changed meanwhile; try again")
            self.vms.put(vm.with_state(now))

    def give_back(self, container: Container) -> None:
        """Lets a state count again that this container has taken, if its VM has ended before the guest ran."""
        if self._taken(container) is None:  # looks without the lock, which a copy of the VM may hold for long
            return
        with self.locks.held_for_all(owner_of(container.spec.pod_disk)):
            if (vm := self._taken(container)) is not None and vm.saved is not None:
                self.vms.put(vm.with_state(dataclasses.replace(vm.saved, taken_by=None)))

    def _taken(self, container: Container) -> VmRecord | None:
        """The record of the container's VM, if the container has taken its state."""
        vm = self.vms.get(container.spec.pod_disk)
        return vm if vm is not None and vm.saved is not None and vm.saved.taken_by == container.id else None

    def keep_copy(self, container: Container) -> None:
        """For a lost database: the guest knows an earlier container. A failure is only logged."""
        sandbox = self.records.sandboxes.get(container.sandbox_id)
        try:
            if sandbox is not None:
                self.copies.keep(container.id, self.records.to_text(sandbox, container))
        except ShimError as exc:
            log.warning("vm.copy.not_kept", container=container.id.short, error=str(exc))

    def _moved(self, state: SavedState, container: Container) -> Mapping[str, str]:
        before = state.directories or directories_of(self.layout, state.container, container.spec.pod_disk)
        return dict(zip(before, directories_of(self.layout, container.id, container.spec.pod_disk), strict=False))


def continuing(container: Container, state: SavedState) -> Container:
    return container.continuing(state.known_as, command_begun=state.command_begun, user=state.user)
