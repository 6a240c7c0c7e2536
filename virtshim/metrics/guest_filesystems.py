"""Asks guests' agents in the background how full their file systems are, as long as somebody reads the numbers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from virtshim.guest.ports import GuestFilesystem, GuestOperations
from virtshim.model.container import Container
from virtshim.model.errors import ShimError
from virtshim.model.ids import ContainerId
from virtshim.store.ports import Records
from virtshim.system.clock import Clock

log = structlog.get_logger(__name__)

# All in seconds. After a failure a guest is asked less often, because it probably has no agent.
_INTERVAL: Final = 60.0
_INTERVAL_AFTER_FAILURE: Final = 600.0
_PATIENCE: Final = 2.0
# If nobody has read the numbers for so long, no guest is asked.
_WANTED: Final = 300.0
_PAUSE: Final = 5.0
# A guest's limit of file system names while it runs, because it may mount and unmount for ever.
_MAX_NAMES: Final = 32

_Key = tuple[str, str, str]


@dataclass(slots=True)
class _Guest:
    due: float
    found: tuple[GuestFilesystem, ...]
    names: set[_Key]


class GuestFilesystems:
    """Thread-safe. If a guest hangs, only its own numbers are missing."""

    def __init__(self, records: Records, guests: GuestOperations, clock: Clock) -> None:
        self._records = records
        self._guests = guests
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[ContainerId, _Guest] = {}
        self._wanted_until = 0.0

    def filesystems(self, container: ContainerId) -> Sequence[GuestFilesystem]:
        """The guest's last answer; empty before its first answer."""
        with self._lock:
            self._wanted_until = self._clock.monotonic() + _WANTED
            found = self._known.get(container)
        return found.found if found else ()

    def run(self, stopping: threading.Event) -> None:
        while not self._clock.wait(stopping, _PAUSE):
            try:
                self.look(stopping)
            except Exception:
                log.exception("guest_filesystems.broken")  # the thread must survive, for the next look

    def look(self, stopping: threading.Event) -> None:
        """Asks the guests that are due."""
        running = [one for one in self._records.containers.all() if one.is_running]
        with self._lock:
            there = {container.id for container in running}
            self._known = {one: known for one, known in self._known.items() if one in there}
            if self._clock.monotonic() >= self._wanted_until:
                return
        for container in running:
            if stopping.is_set():
                return
            with self._lock:
                guest = self._known.setdefault(container.id, _Guest(0.0, (), set()))
            if self._clock.monotonic() >= guest.due and not container.status.frozen:
                self._ask(container, guest)

    def _ask(self, container: Container, guest: _Guest) -> None:
        found: Sequence[GuestFilesystem] = ()
        pause = _INTERVAL
        try:
            found = self._guests.filesystems(container.id, _PATIENCE)
        except ShimError:
            pause = _INTERVAL_AFTER_FAILURE
        with self._lock:
            guest.found = tuple(_known_names(found, guest.names))
            guest.due = self._clock.monotonic() + pause


def _known_names(found: Sequence[GuestFilesystem], names: set[_Key]) -> list[GuestFilesystem]:
    """Each file system once; omits new names beyond the limit."""
    kept: dict[_Key, GuestFilesystem] = {}
    for one in found:
        key = (one.device, one.kind, one.mount_point)
        if one.total_bytes and (key in names or len(names) < _MAX_NAMES):
            names.add(key)
            kept[key] = one
    return list(kept.values())
