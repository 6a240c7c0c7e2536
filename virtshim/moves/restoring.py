"""Continues a saved VM in another sandbox, once.

libvirt loads the memory into a paused VM. Then the VM's record says that the state is used up, and then the guest runs: never
two guests from one state, and never old memory on a disk that a guest has written to since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os.path
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from virtshim.containers.logs import ContainerLogs
from virtshim.guest.freeze import GuestFreezer
from virtshim.model.container import Container
from virtshim.model.errors import ShimError
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout, vnc_socket
from virtshim.moves.ports import SavedVms
from virtshim.moves.saving import SaveVm
from virtshim.moves.values import SavedState, VmRecord, restorable
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks
from virtshim.vm.ports import Hypervisor, VmPausing

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RestoreVm:
    records: Records
    vms: SavedVms
    hypervisor: Hypervisor
    pausing: VmPausing
    logs: ContainerLogs
    freezer: GuestFreezer
    clock: Clock
    locks: PodLocks
    layout: Layout

    def start(self, container: Container) -> Container:
        """Starts the container's VM: from its saved state, if there is one that it may continue from, and paused; else it
        boots. Returns the container, RUNNING and not recorded yet. `go_on` must follow when it is recorded."""
        vm = self.vms.get(container.spec.pod_disk) if container.spec.vm else None
        state = restorable(vm, container)
        if vm is None or state is None:
            self._lose(vm, container)  # the guest is about to change the disk that the state belongs to
            self.hypervisor.start(container.domain_uuid)
            return container.running(self.clock.now_ns())
        try:
            self.hypervisor.restore(container.domain_uuid, self.vms.memory(vm.disk), self._moved(state, container))
            if container.spec.command:  # its output goes on where it was read to
                self.logs.entrypoints.write(container.id, (), state.read_to)
        except ShimError:
            self.vms.put(vm.with_state(dataclasses.replace(state, failed_in=container.sandbox_id)))
            raise
        self.vms.put(vm.with_state(dataclasses.replace(state, taken_by=container.id)))
        return _continuing(container.running(self.clock.now_ns()), state)

    def go_on(self, container: Container) -> Container:
        """Resumes a VM that was restored, and removes the state. Returns the container as it is recorded now. May be repeated,
        also by another process."""
        if not container.status.arriving:
            return container
        self.pausing.resume(container.domain_uuid)
        now = container.arrived()
        self.records.containers.replace(now)
        self._drop(self.vms.get(container.spec.pod_disk))
        self.freezer.after_resume(container.id)  # sets its clock
        log.info("vm.restored", container=container.id.short, vm=container.spec.vm)
        return now

    def taken(self, container: Container) -> Container | None:
        """Of a container that is not RUNNING in its record while its VM is on: the container as it continues, if it took the
        state. Raises nothing else than ShimError. None if its VM must not run: its state still counts."""
        vm = self.vms.get(container.spec.pod_disk) if container.spec.vm else None
        state = vm.saved if vm is not None else None
        running = container.running(self.clock.now_ns())
        if state is None:
            return running  # it booted
        return _continuing(running, state) if state.taken_by == container.id else None

    def _lose(self, vm: VmRecord | None, container: Container) -> None:
        state = vm.saved if vm is not None else None
        if state is not None and state.taken_by is None:
            again = "a restart in the same sandbox boots"
            why = again if state.failed_in is None else "it could not be restored"
            log.warning("vm.state.lost", container=container.id.short, vm=container.spec.vm, why=why)
            with contextlib.suppress(ShimError):
                self.logs.note(container, f"virtshim: the guest boots, and its saved memory is discarded: {why}")
        self._drop(vm)

    def _drop(self, vm: VmRecord | None) -> None:
        if vm is not None and vm.saved is not None:
            self.vms.put(vm.with_state(None))
            self.vms.discard(vm.disk)

    def _moved(self, state: SavedState, container: Container) -> Mapping[str, str]:
        def of(one: ContainerId) -> tuple[str, ...]:
            layout = self.layout
            return layout.container_dir(one), layout.socket_dir(one), os.path.dirname(vnc_socket(layout, one))

        return dict(zip(of(state.container), of(container.id), strict=True))


@dataclass(frozen=True, slots=True)
class VmStates:
    """Saving and restoring, for those who stop, start and repair."""

    saving: SaveVm
    restoring: RestoreVm

    def finish_leftover(self, container: Container) -> None:
        """Finishes what another process began. Harmless if it is under way."""
        if container.status.saving:
            self.saving.finish_leftover(container)
        if container.status.arriving:
            with self.restoring.locks.held(container.sandbox_id):
                now = self.restoring.records.containers.get(container.id)
                if now is not None and now.is_running:
                    self.restoring.go_on(now)


def _continuing(container: Container, state: SavedState) -> Container:
    return container.continuing(state.known_as, command_begun=state.command_begun, user=state.user)
