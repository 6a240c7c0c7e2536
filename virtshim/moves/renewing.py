"""Gives a running guest a new QEMU: saves its memory and continues with it in the same container, on the same taps.

The container stays RUNNING. The pod's lock is held while the VM is off, so that nobody takes this for the container's end. If
the guest cannot continue, the container ends, and its exit says what became of the memory.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import structlog

from virtshim.model.container import Container, Exit, ExitReason
from virtshim.model.errors import Aborted, DeadlineExceeded, NotFound, ResourceExhausted, ShimError, Unavailable
from virtshim.model.sizing import NodeLimits
from virtshim.moves.receiving import ReceiveVm
from virtshim.moves.restoring import RestoreVm, continuing
from virtshim.moves.saving import SaveVm, saved_exit
from virtshim.moves.sending import Departures
from virtshim.moves.values import SavedState
from virtshim.system.live import Live

log = structlog.get_logger(__name__)

# The exit code of a command that SIGKILL ended.
_LOST_CODE = 137


@dataclass(frozen=True, slots=True)
class RenewVm:
    saving: SaveVm
    restoring: RestoreVm
    sizes: Live[NodeLimits]

    def renew(self, container: Container, timeout: float) -> None:
        """Returns when the guest runs in a new QEMU. `timeout` is for the writing. If the memory cannot be
        written, the guest keeps running in the old QEMU. After any later error the container has ended, or
        `finish_leftover` continues."""
        with self.saving.alone(container.id) as is_alone:
            if not is_alone:
                raise Aborted(f"container {container.id} is being saved already; wait for it")
            state = self.saving.state_of(container, timeout, by_operator=True, renewing=True)
            self._change_qemu(container, state)

    def finish_leftover(self, container: Container) -> None:
        """Finishes what another process began, or this one had to break off: in a new QEMU if the state counts, else in the old
        one."""
        with self.saving.alone(container.id) as is_alone:
            now = self.saving.records.containers.get(container.id)
            if not is_alone or now is None or not now.is_running or not now.status.renewing:
                return
            state = self.saving.vm(now).state_left_by(now.id)
            if state is not None:
                self._change_qemu(now, state)
            elif self.saving.hypervisor.power(now.domain_uuid).is_on:
                self.saving.go_on(now)
            else:  # QEMU ended before the state counted
                self._end(now, None)

    def _change_qemu(self, container: Container, state: SavedState) -> None:
        saving, restoring = self.saving, self.restoring
        with saving.locks.held(container.sandbox_id):
            now = saving.records.containers.get(container.id)
            if now is None or not now.is_running or not now.status.renewing:
                raise Aborted(f"container {container.id} ended while its memory was written")
            saving.hypervisor.destroy(now.domain_uuid, now.id)
            try:
                self._open_network(now)
                restoring.load(now, saving.vm(now), state, threading.Event())
            except (Unavailable, ResourceExhausted, DeadlineExceeded, NotFound):
                self._end(now, saved_exit(state))  # the next attempt may have more luck
                raise
            except ShimError as exc:
                message = f"a new QEMU could not continue with the guest's memory: {exc}"
                self._end(now, Exit(_LOST_CODE, ExitReason.ERROR, saving.clock.now_ns(), message))
                raise
            now = continuing(now, state)
            saving.records.containers.replace(now)
            restoring.keep_copy(now)
            restoring.go_on(now)
        saving.exits.record_if_ended(container.id)  # events that came meanwhile were not for this QEMU
        log.info("vm.renewed", container=container.id.short, vm=container.spec.vm)

    def _open_network(self, container: Container) -> None:
        sandbox = self.saving.records.sandboxes.get(container.sandbox_id)
        if sandbox is None:
            raise NotFound(f"the sandbox of container {container.id} is gone")
        self.saving.exits.parts.open_cgroup(container, sandbox, self.sizes.now)

    def _close_network(self, container: Container) -> None:
        parts = self.saving.exits.parts
        try:
            parts.cgroups.start_failed(container.sandbox_id, parts.timeout)
        except ShimError as exc:  # the next start replaces what is open
            log.warning("network.not_closed", container=container.id.short, error=str(exc))

    def _end(self, container: Container, how: Exit | None) -> None:
        """Ends the container. `how`: None if its VM is off by itself."""
        with self.saving.locks.held(container.sandbox_id):
            ending = container.with_saving(saving=False)
            self.saving.records.containers.replace(ending.with_ending(how) if how is not None else ending)
            if how is not None:
                self.saving.hypervisor.destroy(container.domain_uuid, container.id)
                self._close_network(container)
            self.saving.exits.record_if_ended(container.id)


@dataclass(frozen=True, slots=True)
class VmStates:
    """Saving and restoring, for those who stop, start and repair."""

    saving: SaveVm
    restoring: RestoreVm
    renewing: RenewVm
    receiving: ReceiveVm
    departures: Departures

    def is_elsewhere(self, container: Container) -> bool:
        """Whether its guest has moved away, or has not arrived yet."""
        has_moved = container.status.moved_to or self.departures.has_left(container)
        return bool(has_moved) or self.receiving.awaits(container)

    def finish_leftover(self, container: Container) -> None:
        """Finishes a save, restore or move that another process began. Does nothing if this process is at it."""
        if container.status.moved_to or self.departures.has_left(container):
            self.departures.finish(container)
        elif container.status.renewing:
            self.renewing.finish_leftover(container)
        elif container.status.saving:
            self.saving.finish_leftover(container)
        elif container.status.arriving:
            self.receiving.finish_leftover(container)

    def reconcile(self, *, rebooted: bool) -> None:
        """Makes containers' records agree with VMs' records. Called at the start, before the repairs. The VMs' records decide,
        because they are on disk before a guest runs; a container's record may be older, or rebuilt from a copy."""
        containers = {one.id: one for one in self.restoring.records.containers.all()}
        for vm in self.restoring.vms.all():
            users = [one for one in containers.values() if one.spec.pod_disk == vm.disk and one.is_running]
            for one in users:
                if vm.departure is not None and vm.has_left:
                    if not one.status.moved_to:
                        self.restoring.records.containers.replace(one.moved(vm.departure.node))
                elif vm.saved is not None:
                    self._agree(one, vm.saved, rebooted=rebooted)
            if vm.has_left:
                self._drop_disk(vm.disk)

    def _drop_disk(self, disk: str) -> None:
        try:
            self.departures.drop_disk(disk)
        except ShimError as exc:  # the next start repeats it
            log.warning("vm.disk.not_dropped", disk=disk, error=str(exc))

    def _agree(self, container: Container, state: SavedState, *, rebooted: bool) -> None:
        records = self.restoring.records.containers
        is_own = state.taken_by is None and state.container == container.id
        if state.taken_by == container.id:
            if container.status.known_as is None or container.status.renewing:
                records.replace(continuing(container, state))
        elif is_own and state.renewing and not rebooted and container.status.ending is None:
            records.replace(container.with_saving(saving=True, renewing=True))
        elif is_own:
            ending = container.status.ending or saved_exit(state)
            records.replace(container.with_saving(saving=True).with_ending(ending))
        elif state.taken_by is None:  # no other guest may run on the disk of a saved state
            log.warning("vm.ended", container=container.id.short, why="its disk belongs to a saved state")
            self.restoring.hypervisor.destroy(container.domain_uuid, container.id)
