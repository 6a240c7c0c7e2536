"""RemovePodSandbox: stops what runs, then removes containers, network and, last, the record."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from virtshim.containers.remove_container import RemoveContainer
from virtshim.disks.ports import RootDisks
from virtshim.images.service import ImageService
from virtshim.metrics.start_ups import StartUps
from virtshim.model.deadline import Deadline
from virtshim.model.sandbox import Sandbox, pod_hash
from virtshim.pods.stop_sandbox import StopSandbox
from virtshim.store.ports import Records
from virtshim.system.locks import PodLocks

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RemoveSandbox:
    records: Records
    stop_sandbox: StopSandbox
    remove_container: RemoveContainer
    disks: RootDisks
    images: ImageService
    locks: PodLocks
    start_ups: StartUps

    def remove(self, wanted: Sandbox, deadline: Deadline) -> None:
        """Idempotent. If the network cannot be released, the record stays and the error is raised, so that nothing is
        lost."""
        self.stop_sandbox.stop(wanted, deadline)  # after this nothing is made or started in the sandbox
        for container in self.records.containers.all():  # without the lock, because releasing a VM's devices needs it
            if container.sandbox_id == wanted.id:
                self.remove_container.remove(container)
        with self.locks.held(wanted.id):
            sandbox = self.records.sandboxes.get(wanted.id)
            if sandbox is None:
                return
            sandbox.refuse_if_ready()
            with self.locks.held_for_all(pod_hash(sandbox.key)):
                self._remove_disks_with_the_last(sandbox)
                self.records.sandboxes.delete(sandbox.id)
            self.start_ups.forget(sandbox.id)
        for image in set(sandbox.root_disks.values()):
            self.images.collect(image)
        log.info("sandbox.removed", sandbox=wanted.id.short)

    def _remove_disks_with_the_last(self, sandbox: Sandbox) -> None:
        """Removes the root disks that stay for the pod's life, if this is the pod's last sandbox."""
        others = (other for other in self.records.sandboxes.all() if other.id != sandbox.id)
        if sandbox.root_disks and not any(other.key.is_same_pod(sandbox.key) for other in others):
            self.disks.delete_pod_disks(pod_hash(sandbox.key))
            log.info("pod.disks.removed", pod=str(sandbox.key))
