"""StopPodSandbox: ends containers, makes the sandbox NOT_READY, copies VMs to their state volumes and releases the network.
Idempotent."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from virtshim.containers.parts import ContainerParts
from virtshim.containers.stop_container import StopContainer
from virtshim.model.container import ContainerPhase
from virtshim.model.deadline import Deadline
from virtshim.model.ids import SandboxId
from virtshim.model.sandbox import Sandbox, SandboxPhase
from virtshim.moves.saving import SaveVm
from virtshim.pods.ports import PodNetworks
from virtshim.store.ports import Records
from virtshim.streaming.ports import Streaming
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks

log = structlog.get_logger(__name__)

_AT_REST = (ContainerPhase.CREATED, ContainerPhase.EXITED)


@dataclass(frozen=True, slots=True)
class StopSandbox:
    """`parts.timeout`: seconds that CNI DEL gets even if the caller's deadline is earlier."""

    records: Records
    clock: Clock
    locks: PodLocks
    parts: ContainerParts
    networks: PodNetworks
    streaming: Streaming
    stop_container: StopContainer
    saving: SaveVm

    def stop(self, wanted: Sandbox, deadline: Deadline) -> None:
        """Containers get no grace period, because kubelet has stopped its own by now. The copies to
        state volumes and the release of the network are made once; a failure is raised, and the next call tries again."""
        self._kill_containers(wanted.id)
        with self.locks.held_to_end(wanted.id):
            sandbox = self.records.sandboxes.get(wanted.id)
            if sandbox is None:
                return
            self._kill_containers(sandbox.id)  # containers that started while this call waited for the lock
            self._end_unstarted(sandbox.id)
            if sandbox.phase is SandboxPhase.READY:
                sandbox = sandbox.not_ready("stopped")
                self.records.sandboxes.replace(sandbox)
            self._free_devices(sandbox.id)
            self.streaming.end_sandbox(sandbox.id)
        # Without the pod's lock, because both may take long. Devices come before CNI DEL, which takes back NICs that are host
        # functions.
        self._await_devices(wanted.id)
        sandbox = self.records.sandboxes.get(wanted.id)
        if sandbox is not None and not sandbox.network_released:
            self.saving.publish(sandbox.id, deadline.left(self.clock.monotonic()))
        with self.locks.held(wanted.id):
            sandbox = self.records.sandboxes.get(wanted.id)
            if sandbox is None or sandbox.network_released:
                return
            sandbox.refuse_if_ready()
            timeout = max(self.parts.timeout, deadline.left(self.clock.monotonic()))
            self.networks.release(sandbox.id, timeout)
            self.records.sandboxes.replace(sandbox.with_network_released())
        log.info("sandbox.stopped", sandbox=sandbox.id.short)

    def _kill_containers(self, sandbox: SandboxId) -> None:
        for container in self.records.containers.all():  # a pod is one virtual machine, so at most one runs
            if container.sandbox_id == sandbox and container.may_be_running:
                self.stop_container.kill(container, "killed: its pod was stopped")

    def _end_unstarted(self, sandbox: SandboxId) -> None:
        """Destroys VMs whose starts may have failed between libvirt's start and the record. The caller holds the
        lock."""
        for container in self.records.containers.all():
            if container.sandbox_id == sandbox and container.phase is ContainerPhase.CREATED:
                self.parts.hypervisor.destroy(container.domain_uuid, container.id)

    def _free_devices(self, sandbox: SandboxId) -> None:
        """Frees the devices of containers that never ran. None of the pod's VMs is on, and none is started any more."""
        for container in self.records.containers.all():
            at_rest = container.phase in _AT_REST and not container.owes_devices
            if container.sandbox_id == sandbox and container.claims and at_rest:
                self.records.containers.replace(container.with_claims(()))

    def _await_devices(self, sandbox: SandboxId) -> None:
        """Waits until the devices are free: once the pod has stopped, kubelet may grant them to another pod."""
        for container in self.records.containers.all():
            if container.sandbox_id == sandbox:
                self.parts.devices.releases.try_to_finish(container.id)
