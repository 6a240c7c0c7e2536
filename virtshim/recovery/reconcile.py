"""Repeats the comparison of start-up while serving, for what start-up missed and what was left over since, and checks
how full the images' file system is.

A difference is only repaired if two looks at least a minute apart have found it, if no call is busy with its pod, and
if it still exists with the pod's lock held. Nothing that is being created or removed is therefore mistaken for a
leftover.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.devices.resets import DeviceResets
from virtshim.images.service import ImageService
from virtshim.metrics import observed
from virtshim.model.errors import ShimError
from virtshim.recovery.image_gc import ImageGc
from virtshim.recovery.plan import plan
from virtshim.recovery.recover import Survey
from virtshim.recovery.repairs import FOLLOW, Repair, RepairRunner, Repairs
from virtshim.store.ports import StateRecords
from virtshim.system.clock import Clock
from virtshim.system.live import Live
from virtshim.system.locks import PodLocks

log = structlog.get_logger(__name__)

# Seconds for which a difference must have existed.
_AGE: Final = 60.0


@dataclass(slots=True)
class Reconcile:
    """`interval`: seconds between two looks. Differences that must be confirmed shorten it."""

    records: StateRecords
    survey: Survey
    repairs: Repairs
    repair_runner: RepairRunner
    images: ImageService
    image_gc: ImageGc
    locks: PodLocks
    clock: Clock
    interval: Live[float]
    resets: DeviceResets
    _seen: dict[str, float] = field(default_factory=dict)

    def run(self, stopping: threading.Event) -> None:
        """Repeats looks until `stopping` is set."""
        while not self.clock.wait(stopping, self._pause()):
            result, began = observed.OK, self.clock.monotonic()
            try:
                self.look()
            except ShimError as exc:
                result = observed.kind_of(exc)
                log.warning("reconcile.failed", error=str(exc))
            except Exception:
                result = observed.CRASHED
                log.exception("reconcile.broken")  # any error: the next look must come
            observed.meter().tell(observed.Reconciled(result, self.clock.monotonic() - began))

    def _pause(self) -> float:
        interval = self.interval.now
        return min(interval, _AGE) if self._seen or self.repair_runner.unfinished() else interval

    def look(self) -> None:
        """One look. If reading fails, it raises that error and has changed nothing."""
        self.records.check()
        if trouble := self.records.trouble():
            log.critical("database.damaged", error=trouble)
            return
        before = self.repair_runner.unfinished()
        found = [repair for repair in self._differences() if repair.what != FOLLOW or repair.name in before]
        now = self.clock.monotonic()
        self._seen = {repair.name: self._seen.get(repair.name, now) for repair in found}
        left = self.repair_runner.begin_round(self._seen)
        for repair in found:
            if now - self._seen[repair.name] >= _AGE:
                left = self._make(repair, left)
        self.resets.try_again()
        self.image_gc.look()

    def _differences(self) -> Iterator[Repair]:
        found = self.survey.take()
        yield from self.repairs.steps(plan(found), rebooted=False)
        if not found.in_doubt:
            yield from self.repairs.idle_devices()
        for digest in sorted(self.images.unneeded()):
            yield Repair("stray image", digest, self.images.collect, frozenset({digest.value}), None)

    def _make(self, repair: Repair, left: float) -> float:
        if repair.pod is not None and self.locks.is_busy(repair.pod):
            return left
        return self.repair_runner.make(repair.guarded(self._alone), left)

    def _alone(self, repair: Repair) -> None:
        """Runs on the repair's own thread."""
        with contextlib.nullcontext() if repair.pod is None else self.locks.held(repair.pod):
            if not self.repairs.still_due(repair):
                return
            if repair.is_of_leftover and repair.name not in self.repair_runner.unfinished():
                observed.meter().tell(observed.Leftover(repair.what))
            log.warning("reconcile.repair", what=repair.what, item=repair.name)
            if not repair.takes_lock:
                repair.do(repair.item)
        if repair.takes_lock:
            repair.do(repair.item)
