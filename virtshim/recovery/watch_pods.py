"""Checks every pod periodically for what sends no event: a lost network, a missed power event, new space on a full
disk."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from virtshim.containers.checkpoint_container import CheckpointContainer
from virtshim.containers.parts import ContainerParts
from virtshim.containers.record_exit import ExitRecorder
from virtshim.guest.freeze import GuestFreezer
from virtshim.guest.set_up import GuestSetUp
from virtshim.model.container import Container, Exit, ExitReason
from virtshim.model.deadline import Deadline
from virtshim.model.errors import ShimError
from virtshim.model.ids import SandboxId
from virtshim.model.sandbox import Sandbox, SandboxPhase
from virtshim.model.vm import OwnedDomain, PauseReason, Power
from virtshim.moves.renewing import VmStates
from virtshim.pods.ports import PodNetworks
from virtshim.pods.remove_sandbox import RemoveSandbox
from virtshim.pods.stop_sandbox import StopSandbox
from virtshim.recovery.repairs import Repair, RepairRunner
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks
from virtshim.vm.ports import VmPausing

log = structlog.get_logger(__name__)

# Seconds between two rounds: kubelet needs about as long to act on a sandbox that is not ready.
_INTERVAL: Final = 10.0
# The exit code of a program that SIGKILL ended.
_LOST_CODE: Final = 137
# Bytes that must be free before a VM that met a full disk is resumed; with less it would stop again at once.
_ROOM_WANTED: Final = 64 << 20
# Seconds that a round waits for one pod. What takes longer continues beside it.
_PATIENCE: Final = 2.0


@dataclass(frozen=True, slots=True)
class WatchPods:
    records: Records
    clock: Clock
    locks: PodLocks
    parts: ContainerParts
    networks: PodNetworks
    pausing: VmPausing
    exits: ExitRecorder
    checkpoints: CheckpointContainer
    freezer: GuestFreezer
    states: VmStates
    guest_set_up: GuestSetUp
    stop_sandbox: StopSandbox
    remove_sandbox: RemoveSandbox
    runner: RepairRunner

    def run(self, stopping: threading.Event) -> None:
        """Runs rounds until `stopping` is set."""
        while not stopping.is_set():
            self.look()
            self.clock.wait(stopping, _INTERVAL)

    def look(self) -> None:
        """One round. What cannot be read now is left to the next round."""
        for part in (
            self.parts.devices.health.look,
            self.parts.volumes.look,
            self._passts,
            self._machines,
            self._networks,
            self._adopted,
            self.parts.devices.releases.begin_all,
            self.guest_set_up.look,
            self.states.saving.expire,
        ):
            self._try(part)

    def _try(self, part: Callable[[], object]) -> None:
        try:
            part()
        except ShimError as exc:
            log.warning("watch.failed", error=str(exc))
        except Exception:
            log.exception("watch.broken")  # any error: the next round must come

    def _passts(self) -> None:
        for container in self.parts.volumes.cut_off():
            self._try(partial(self._end_cut_off, container))

    def _end_cut_off(self, container: Container) -> None:
        """The guest keeps its carrier and would never notice. kubelet restarts the container, with another passt."""
        if not self.parts.hypervisor.power(container.domain_uuid).has_ended:
            if self._begin_lost(container, "its passt has ended, which connected it with the pod's network") is None:
                return
            log.warning("vm.cut_off", container=container.id.short)
            self.parts.hypervisor.destroy(container.domain_uuid, container.id)
        self.exits.record_if_ended(container.id)

    def _machines(self) -> None:
        """Asks libvirt once for all VMs, and examines only those that differ from their records."""
        running = [c for c in self.records.containers.all() if c.is_running]
        if not running:
            return
        domains = {domain.container_id: domain for domain in self.parts.hypervisor.owned()}
        for container in running:
            if container.status.checkpointing or container.status.frozen:  # harmless if it is still under way
                self._try(partial(self.checkpoints.finish_leftover, container))
            if container.status.saving or container.status.arriving:
                self._try(partial(self._finish_state, container))
            domain = domains.get(container.id)
            troubled = (
                container.status.trouble
                or self.parts.devices.health.troubles(container)
                or self.parts.volumes.troubles(container)
                or self.exits.notices.owes(container)
            )
            stands = container.status.paused or (domain is not None and domain.state.power is Power.PAUSED)
            if domain is None or domain.state.has_ended or troubled or stands:
                self._try(partial(self._look_closer, container, domain))

    def _finish_state(self, container: Container) -> None:
        receiving = self.states.receiving
        if receiving.follows(container) or not receiving.is_undecided(container):
            self.states.finish_leftover(container)
            return
        # Only the other node knows where the guest may run, and it may not answer.
        about = frozenset({container.id.value})
        repair = Repair("undecided move", container, self.states.finish_leftover, about, container.sandbox_id)
        self.runner.make(repair, _PATIENCE)

    def _look_closer(self, container: Container, domain: OwnedDomain | None) -> None:
        self.exits.record_if_ended(container.id)
        if domain is not None and domain.state.pause is PauseReason.IO_ERROR and not container.status.paused:
            self._go_on(container, container.domain_uuid)

    def _go_on(self, container: Container, domain: uuid.UUID) -> None:
        """Resuming is safe: QEMU holds the failed writes and repeats them. Without space the VM only stops again."""
        now = self.records.containers.get(container.id)
        if now is None or now.status.saving or not now.is_running:
            return
        if self.parts.disks.free_bytes() >= _ROOM_WANTED and self.pausing.out_of_space(domain):
            log.info("vm.resumed", container=container.id.short, why="there is space for its disk again")
            self.pausing.resume(domain, container.id)
            self.freezer.after_resume(container.id)
            self.exits.record_if_ended(container.id)

    def _networks(self) -> None:
        ready = [s.id for s in self.records.sandboxes.all() if s.is_ready]  # read first, so each was attached by then
        if not ready:
            return
        attached = self.networks.attached(self.parts.timeout)
        lost = self.networks.lost(self.parts.timeout)
        for sandbox in ready:
            if sandbox not in attached:
                self._lost_network(sandbox, "tapmanager no longer knows it")
            elif sandbox in lost:
                self._lost_network(sandbox, lost[sandbox])

    def _lost_network(self, wanted: SandboxId, why: str) -> None:
        """kubelet then stops its containers and replaces it. StopPodSandbox releases what CNI still holds."""
        with self.locks.held(wanted):
            sandbox = self.records.sandboxes.get(wanted)
            if sandbox is None or not sandbox.is_ready:
                return
            self.records.sandboxes.replace(sandbox.not_ready(f"its network is gone: {why}"))
        log.warning("sandbox.lost", sandbox=wanted.short, why=why)

    def _adopted(self) -> None:
        """kubelet does not see that an adopted sandbox is not ready here: the runtime that made it may still show it as ready, or
        may have removed it without virtshim's knowledge. So virtshim ends the VM itself, and the record goes with the last
        container, unless the pod's next sandbox needs it. Adopt makes the sandbox ready again if it still exists."""
        for sandbox in self.records.sandboxes.all():
            if sandbox.adopted is None or sandbox.phase is not SandboxPhase.NOT_READY:
                continue
            own = self._containers_of(sandbox.id)
            if any(container.is_running for container in own) or (not own and not self._awaits_another(sandbox)):
                about = frozenset({sandbox.id.value})
                self.runner.make(Repair("lost adopted sandbox", sandbox, self._end_lost, about, sandbox.id), _PATIENCE)

    def _end_lost(self, wanted: Sandbox) -> None:
        deadline = Deadline.after(self.clock.monotonic(), self.parts.timeout)
        with self.locks.held(wanted.id):  # Adopt may have made it ready meanwhile
            sandbox = self.records.sandboxes.get(wanted.id)
            if sandbox is None or sandbox.is_ready:
                return
            own = self._containers_of(sandbox.id)
            if not own:
                self.remove_sandbox.remove(sandbox, deadline)
                return
            for container in own:
                self._begin_lost(container, sandbox.reason)
        self.stop_sandbox.stop(sandbox, deadline)

    def _awaits_another(self, sandbox: Sandbox) -> bool:
        """Whether this record keeps the root disk for the next sandbox of the pod, because it is the pod's newest. kubelet may
        remove the last container before it makes that sandbox."""
        newer = (other for other in self.records.sandboxes.all() if other.created_at > sandbox.created_at)
        if not sandbox.root_disks or any(other.key.is_same_pod(sandbox.key) for other in newer):
            return False
        return self.parts.volumes.copies.files.has_pod(sandbox.config.log_directory)

    def _begin_lost(self, container: Container, why: str) -> Container | None:
        how = Exit(_LOST_CODE, ExitReason.NETWORK_LOST, self.clock.now_ns(), f"killed: {why}")
        return self.exits.begin_end(container.id, how)

    def _containers_of(self, sandbox: SandboxId) -> list[Container]:
        return [container for container in self.records.containers.all() if container.sandbox_id == sandbox]
