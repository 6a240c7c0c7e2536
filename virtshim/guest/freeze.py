"""Freezes a guest's file systems before its VM is paused, and afterwards thaws them and sets the guest's clock. An
operator may freeze them for a while, too.

A guest without an agent is not frozen, and nobody waits for it.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.guest.ports import GuestOperations
from virtshim.model.container import Container
from virtshim.model.errors import Aborted, ShimError, WrongState
from virtshim.model.ids import ContainerId
from virtshim.pods.lookup import running
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks, new_lock
from virtshim.system.threads import ContainerThreads

log = structlog.get_logger(__name__)

# All in seconds. The guest's programs wait while its file systems come to rest.
_FREEZE: Final = 10.0
_ANSWER: Final = 5.0
# Pauses between two attempts to thaw, because a guest must not stay frozen.
_SOONEST, _LATEST = 0.5, 30.0


@dataclass(slots=True)
class _Hold:
    """A freeze with a time limit. `until`: when it ends, on the monotonic clock. `over`: set when it is no longer needed."""

    until: float
    over: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class GuestFreezer:
    """Each resumed guest has a thread until it has answered."""

    records: Records
    guests: GuestOperations
    clock: Clock
    locks: PodLocks
    _threads: ContainerThreads = field(default_factory=lambda: ContainerThreads("thaw"))
    _limits: ContainerThreads = field(default_factory=lambda: ContainerThreads("freeze-limit"))
    _lock: threading.Lock = field(default_factory=new_lock)
    _held: dict[ContainerId, _Hold] = field(default_factory=dict)

    def freeze(self, container: Container) -> int:
        """Returns how many of its file systems are frozen; 0 if none could be, with the reason in the log.
        `after_resume` must follow. The record notes the freeze first, so that the guest is thawed even after a
        crash."""
        try:
            return self._freeze(container)
        except WrongState as exc:
            log.info("guest.not_frozen", container=container.id.short, why=str(exc))
        except ShimError as exc:
            log.warning("guest.not_frozen", container=container.id.short, why=str(exc))
        return 0

    def _freeze(self, container: Container) -> int:
        """Raises the errors of `GuestOperations.freeze`, and Aborted."""
        earlier = self._threads.thread(container.id)
        if earlier is not None:
            earlier.join(_ANSWER)
            if earlier.is_alive():
                raise Aborted("an earlier thaw is unanswered")
        self._note(container.id, frozen=True)
        try:
            count = self.guests.freeze(container.id, _FREEZE)
        except WrongState:
            self._note(container.id, frozen=False)
            raise
        log.info("guest.frozen", container=container.id.short, file_systems=count)
        return count

    def hold(self, container: Container, seconds: float) -> int:
        """Like `freeze`, until `thaw_now`, a stop, or the end of `seconds`. Raises ShimError; a guest that may be
        frozen is then thawed. If this process does not thaw it, the next one does."""
        hold = _Hold(self.clock.monotonic() + seconds)
        with self._lock:
            if container.id in self._held:
                raise Aborted(f"container {container.id.short} is being frozen already")
            self._held[container.id] = hold
        try:
            count = self._freeze(container)
            _refuse_none(count, container)
            self._limits.start(container.id, lambda: self._await_limit(container.id, hold), beside_earlier=True)
        except Exception:  # also: no thread that would thaw it in time
            self.forget_hold(container.id)
            self.after_resume(container.id, was_paused=False)
            raise
        return count

    def is_held(self, container: ContainerId) -> bool:
        with self._lock:
            return container in self._held

    def hold_longer(self, container: ContainerId, seconds: float) -> None:
        with self._lock:
            if (hold := self._held.get(container)) is not None:
                hold.until = max(hold.until, self.clock.monotonic() + seconds)

    def forget_hold(self, container: ContainerId) -> None:
        with self._lock:
            hold = self._held.pop(container, None)
        if hold is not None:
            hold.over.set()

    def thaw_now(self, container: ContainerId) -> None:
        """Raises ShimError if the guest does not answer at once; it is then asked again until it does."""
        self.forget_hold(container)
        try:
            self.guests.thaw(container, _ANSWER)
        except ShimError:
            self.after_resume(container, was_paused=False)
            raise
        self._note(container, frozen=False)
        log.info("guest.thawed", container=container.short)

    def after_resume(self, container: ContainerId, *, was_paused: bool = True) -> None:
        """Thaws the file systems of a resumed VM and, if it was paused, sets its clock. Returns at once. If this is
        under way, it is repeated afterwards, because the running one may have seen an operator's freeze."""
        self._threads.start(container, lambda: self._run(container, was_paused), again=True)

    def is_thawing(self, container: ContainerId) -> bool:
        """Whether a thaw is under way, or its guest has not answered yet."""
        return self._threads.thread(container) is not None

    def close(self) -> None:
        """Stops all threads. The next process finishes their work."""
        with self._lock:
            holds = tuple(self._held.values())
        self._limits.closing.set()
        for hold in holds:
            hold.over.set()
        self._limits.close()
        self._threads.close()

    # --- below: the thread of one guest

    def _await_limit(self, container: ContainerId, hold: _Hold) -> None:
        while (left := hold.until - self.clock.monotonic()) > 0:
            if self.clock.wait(hold.over, left):
                return
        if self._limits.closing.is_set() or hold.over.is_set():
            return
        log.warning("guest.freeze.over", container=container.short, why="nobody thawed it in time")
        self.forget_hold(container)
        self.after_resume(container, was_paused=False)

    def _run(self, container: ContainerId, was_paused: bool) -> None:
        try:
            self._thaw(container)
            if was_paused and not self._threads.closing.is_set() and running(self.records, container) is not None:
                self.guests.set_clock(container, _ANSWER)
        except ShimError as exc:
            log.info("guest.clock.not_set", container=container.short, why=str(exc))
        except Exception:  # any error: the thread must leave a trace
            log.exception("guest.thaw.crashed", container=container.short)

    def _thaw(self, wanted: ContainerId) -> None:
        pause, last_error = _SOONEST, ""
        while (
            not self._threads.closing.is_set()
            and (container := running(self.records, wanted)) is not None
            and container.status.frozen
            and not self.is_held(wanted)
        ):
            try:
                self.guests.thaw(wanted, _ANSWER)
            except ShimError as exc:
                if str(exc) != last_error:
                    last_error = str(exc)
                    log.warning("guest.not_thawed", container=wanted.short, why=last_error)
                self.clock.wait(self._threads.closing, pause)
                pause = min(2 * pause, _LATEST)
            else:
                self._note(wanted, frozen=False)
                log.info("guest.thawed", container=wanted.short)

    def _note(self, container: ContainerId, *, frozen: bool) -> None:
        found = self.records.containers.get(container)
        if found is None:
            return
        with self.locks.held(found.sandbox_id):
            found = self.records.containers.get(container)
            if found is not None:
                if frozen and found.unusable:
                    raise Aborted(f"container {container.short} {found.unusable}")
                self.records.containers.replace(Container(found.spec, dataclasses.replace(found.status, frozen=frozen)))


def _refuse_none(count: int, container: Container) -> None:
    if not count:
        raise WrongState(
            f"the guest of container {container.id.short} has no file system that can be frozen; a snapshot of its disks needs "
            "no freeze"
        )
