"""What a guest is asked for around a pause of its VM: to freeze its file systems before; to thaw them and set its clock after.

A guest need not have an agent: then none of this happens, and nobody waits for it.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import structlog

from virtshim.domain.container import Container
from virtshim.domain.errors import ShimError, WrongState
from virtshim.domain.ids import ContainerId
from virtshim.ports.clock import Clock
from virtshim.ports.guests import GuestOperations
from virtshim.ports.records import Records
from virtshim.primitives.container_threads import ContainerThreads
from virtshim.primitives.pod_locks import PodLocks

log = structlog.get_logger(__name__)

# All in seconds. Programs of the guest wait while its file systems come to rest.
_FREEZE: Final = 10.0
_ANSWER: Final = 5.0
# Pauses between two attempts to thaw: a guest must not stay frozen.
_SOONEST, _LATEST = 0.5, 30.0


class GuestFreezer:
    """A thread for each guest that was let go on, until it has answered."""

    def __init__(self, records: Records, guests: GuestOperations, clock: Clock, locks: PodLocks) -> None:
        self._records = records
        self._guests = guests
        self._clock = clock
        self._locks = locks
        self._threads = ContainerThreads("thaw")

    def freeze(self, container: Container) -> int:
        """How many of its file systems are frozen now; 0 if none could be, and the log says why. `after_resume` must
        follow. The record tells of it first, so that the guest is thawed whoever dies in between."""
        earlier = self._threads.of(container.id)
        if earlier is not None:
            earlier.join(_ANSWER)
            if earlier.is_alive():
                log.info("guest.not_frozen", container=container.id.short, why="an earlier thaw is unanswered")
                return 0
        self._note(container.id, frozen=True)
        try:
            count = self._guests.freeze(container.id, _FREEZE)
        except WrongState as exc:
            self._note(container.id, frozen=False)
            log.info("guest.not_frozen", container=container.id.short, why=str(exc))
            return 0
        except ShimError as exc:
            log.warning("guest.not_frozen", container=container.id.short, why=str(exc))
            return 0
        log.info("guest.frozen", container=container.id.short, file_systems=count)
        return count

    def after_resume(self, container: ContainerId, *, was_paused: bool = True) -> None:
        """Its VM goes on: its file systems shall, too, and if it stood still its clock is set. Returns at once; nothing if
        that is under way already."""
        self._threads.start(container, lambda: self._run(container, was_paused))

    def close(self) -> None:
        """What is not done the next process does."""
        self._threads.close()

    # --- below: a thread of each guest

    def _run(self, container: ContainerId, was_paused: bool) -> None:
        try:
            self._thaw(container)
            if was_paused and not self._threads.closing.is_set() and self._runs(container) is not None:
                self._guests.set_clock(container, _ANSWER)
        except ShimError as exc:
            log.info("guest.clock.not_set", container=container.short, why=str(exc))
        except Exception:  # the edge of the thread
            log.exception("guest.thaw.crashed", container=container.short)

    def _thaw(self, wanted: ContainerId) -> None:
        pause, last_error = _SOONEST, ""
        while (
            not self._threads.closing.is_set()
            and (container := self._runs(wanted)) is not None
            and container.status.frozen
        ):
            try:
                self._guests.thaw(wanted, _ANSWER)
            except ShimError as exc:
                if str(exc) != last_error:
                    last_error = str(exc)
                    log.warning("guest.not_thawed", container=wanted.short, why=last_error)
                self._clock.wait(self._threads.closing, pause)
                pause = min(2 * pause, _LATEST)
            else:
                self._note(wanted, frozen=False)
                log.info("guest.thawed", container=wanted.short)

    def _runs(self, container: ContainerId) -> Container | None:
        found = self._records.containers.get(container)
        return found if found is not None and found.is_running else None

    def _note(self, container: ContainerId, *, frozen: bool) -> None:
        found = self._records.containers.get(container)
        if found is None:
            return
        with self._locks.held(found.sandbox_id):
            found = self._records.containers.get(container)
            if found is not None:
                self._records.containers.replace(
                    Container(found.spec, dataclasses.replace(found.status, frozen=frozen))
                )
