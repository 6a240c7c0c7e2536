"""A container's termination message: virtshim reads it from the guest before the VM ends, and writes it to kubelet's
file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import structlog

from virtshim.guest.command import MAX_MESSAGE_BYTES, termination_file
from virtshim.guest.ports import GuestOperations, TerminationFiles
from virtshim.model.container import Container
from virtshim.model.errors import ShimError
from virtshim.store.ports import Records

log = structlog.get_logger(__name__)

# Seconds to read it from a guest whose command has just ended, so its agent works, and from any other guest.
_AFTER_A_COMMAND: Final = 5.0
_BEFORE_A_STOP: Final = 1.0


@dataclass(frozen=True, slots=True)
class TerminationMessages:
    records: Records
    guests: GuestOperations
    files: TerminationFiles

    def collect(self, container: Container, most_seconds: float) -> None:
        """Takes at most that time. If the guest has no message or does not answer, kubelet's file stays as it is."""
        wanted = termination_file(container.config.annotations, container.config.mounts)
        sandbox = self.records.sandboxes.get(container.sandbox_id)
        timeout = min(most_seconds, _AFTER_A_COMMAND if container.status.ending else _BEFORE_A_STOP)
        if wanted is None or sandbox is None or timeout <= 0:
            return
        try:
            message = self.guests.read_tail(container.id, wanted.guest, MAX_MESSAGE_BYTES, timeout)
            if message:
                self.files.write(wanted.host, sandbox.key.uid, message)
        except ShimError as exc:
            log.info("container.termination_message.none", container=container.id.short, why=str(exc))
