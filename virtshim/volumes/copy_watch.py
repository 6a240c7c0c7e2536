"""Watches the volumes that kubelet writes for running containers, and gives their guests what has changed."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.guest.set_up import GuestSetUp
from virtshim.model.container import Container
from virtshim.model.ids import ContainerId
from virtshim.pods.lookup import running
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.volumes.ports import KubeletVolumes

log = structlog.get_logger(__name__)

# Seconds: one wait for a change; and between two full checks, which find changes without a notification (mostly of
# modes).
_WAIT: Final = 1.0
_ALL: Final = 60.0


@dataclass(slots=True)
class CopyWatch:
    records: Records
    files: KubeletVolumes
    guest_set_up: GuestSetUp
    clock: Clock
    _due: set[ContainerId] = field(default_factory=set)
    _all_at: float = 0.0

    def run(self, stopping: threading.Event) -> None:
        """Runs until `stopping` is set."""
        while not stopping.is_set():
            try:
                if not self.look(_WAIT):
                    self.clock.wait(stopping, _WAIT)
            except Exception:  # any error: the thread must continue
                log.exception("volumes.watch.broken")
                self.clock.wait(stopping, _WAIT)

    def look(self, wait: float) -> bool:
        """Waits once for changes and passes them on. False if there was nothing to wait for."""
        there = {c.id: c for c in self.records.containers.all() if c.is_running and c.spec.copies}
        self.guest_set_up.volumes.copies.keep(there)
        hosts = {volume.host for container in there.values() for volume in container.spec.copies if volume.renewed}
        changed = self.files.changed(hosts, wait)
        now = self.clock.monotonic()
        if now >= self._all_at:
            self._all_at = now + _ALL
            changed = hosts
        self._due |= {own for own, container in there.items() if _has(container, changed)}
        self._due &= there.keys()
        self._due = {own for own in self._due if not self._renew(own)}
        return bool(hosts)

    def _renew(self, own: ContainerId) -> bool:
        container = running(self.records, own)
        return container is None or self.guest_set_up.renew(container)


def _has(container: Container, changed: Collection[str]) -> bool:
    return any(volume.host in changed for volume in container.spec.copies)
