"""RemovePodSandbox: stops what runs, removes containers, network and record. The record goes last."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from virtshim.domain.deadline import Deadline
from virtshim.domain.sandbox import Sandbox
from virtshim.ports import Records
from virtshim.services.inflight import PodLocks
from virtshim.services.remove_container import RemoveContainer
from virtshim.services.stop_sandbox import StopSandbox

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RemoveSandbox:
    records: Records
    stop_sandbox: StopSandbox
    remove_container: RemoveContainer
    locks: PodLocks

    def remove(self, wanted: Sandbox, deadline: Deadline) -> None:
        """Idempotent. If the network cannot be released the record stays and the error is raised: nothing is forgotten."""
        self.stop_sandbox.stop(wanted, deadline)  # without the lock, which power events wait for
        with self.locks.held(wanted.id):
            sandbox = self.records.sandboxes.get(wanted.id)
            if sandbox is None:
                return
            self.stop_sandbox.stop(sandbox, deadline)
            for container in self.records.containers.all():
                if container.sandbox_id == sandbox.id:
                    self.remove_container.remove(container)
            self.records.sandboxes.delete(sandbox.id)
        log.info("sandbox.removed", sandbox=wanted.id.short)
