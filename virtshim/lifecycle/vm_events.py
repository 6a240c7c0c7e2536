"""Power events: an event is a hint, so the state is read again before anything is written."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import structlog

from virtshim.domain.container import ContainerPhase
from virtshim.domain.errors import ShimError
from virtshim.lifecycle.record_exit import ExitRecorder
from virtshim.ports.records import Records

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class VmEvents:
    records: Records
    exits: ExitRecorder

    def changed(self, domain: uuid.UUID) -> None:
        """Called for each life-cycle event of any domain, foreign ones included."""
        for container in self.records.containers.all():
            if container.domain_uuid == domain and container.phase is ContainerPhase.RUNNING:
                try:
                    self.exits.settle(container.id)
                except ShimError as exc:
                    log.warning("container.exit.unrecorded", container=container.id.short, error=str(exc))
