"""One libvirt call for the statistics of many VMs, which returns in time whatever libvirt and the VMs do.

A QEMU that does not answer its monitor holds up the call that asks it, for ever, and with it the numbers of all other
VMs. But that call also holds the VM's job lock, and a call with NOWAIT skips the monitor of a VM whose lock is taken. So a
call that is late is left behind on its thread, and the next one gets everything else.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.domain.errors import ShimError
from virtshim.hypervisor.stats.counters import Stats
from virtshim.primitives.threads import started
from virtshim.primitives.trouble_log import TroubleLog

log = structlog.get_logger(__name__)

Read = Callable[[Collection[uuid.UUID]], Mapping[uuid.UUID, Stats]]

# libvirtd works on 5 calls of one client at a time (max_client_requests): calls left behind must leave room for the others.
_MAX_CALLS: Final = 3

# While guests boot, a call is late and the next is not, each second. It is over when none was late for so long, seconds.
_CALM: Final = 60.0


@dataclass(eq=False)
class _Call:
    """`started` in seconds of time.monotonic()."""

    wanted: Collection[uuid.UUID]
    started: float
    finished: queue.SimpleQueue[_Call]
    rows: Mapping[uuid.UUID, Stats] = field(default_factory=dict)
    taken_at: int = 0


class BulkStats:
    """`timeout` in seconds is for each attempt; an answer takes three attempts at most. That calls are late is over when none
    was for `calm` seconds. Calls in flight, those left behind
    included, are few. Thread-safe."""

    def __init__(
        self, read: Read, timeout: float = 1.0, now: Callable[[], int] = time.time_ns, calm: float = _CALM
    ) -> None:
        self._read = read
        self._calm = calm
        self._late_until = 0.0
        self._timeout = timeout
        self._now = now
        self._limit = timeout * _MAX_CALLS
        self._changed = threading.Condition()
        self._running: list[_Call] = []
        self._trouble = TroubleLog(log, over="libvirt.statistics.back")

    def latest(self, wanted: Collection[uuid.UUID]) -> tuple[int, Mapping[uuid.UUID, Stats]]:
        """When they were read (ns since the epoch), and the numbers of each wanted VM that could be read; none if libvirt
        does not answer. Never raises."""
        until = time.monotonic() + self._limit
        finished: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        while (left := until - time.monotonic()) > 0 and self._begin(wanted, finished, min(left, self._timeout)):
            try:
                # A call that is only slow may still be the first to come back.
                call = finished.get(timeout=min(left, self._timeout))
            except queue.Empty:
                self._late_until = time.monotonic() + self._calm
                self._trouble.met("libvirt.statistics.late", seconds=self._timeout)
            else:
                return call.taken_at, call.rows
        return self._now(), {}

    def _begin(self, wanted: Collection[uuid.UUID], finished: queue.SimpleQueue[_Call], timeout: float) -> bool:
        """Starts a call, waiting for one of others' to end if there are too many. False if all of them are left behind."""
        with self._changed:
            if self._all_left_behind():
                return False
            self._changed.wait_for(lambda: len(self._running) < _MAX_CALLS, timeout)
            if len(self._running) >= _MAX_CALLS:
                return True  # a call of our own may be among them
            call = _Call(wanted, time.monotonic(), finished)
            started(threading.Thread(target=self._run, args=(call,), name="vm-statistics", daemon=True))
            self._running.append(call)  # it takes the lock before it takes itself out
        return True

    def _all_left_behind(self) -> bool:
        oldest = time.monotonic() - self._limit
        return len(self._running) >= _MAX_CALLS and all(call.started < oldest for call in self._running)

    def _run(self, call: _Call) -> None:
        try:
            call.rows = self._read(call.wanted)
            if time.monotonic() - call.started < self._timeout and time.monotonic() > self._late_until:
                self._trouble.over()
        except ShimError as exc:
            self._trouble.met("libvirt.statistics.failed", error=str(exc))
        finally:
            call.taken_at = self._now()
            with self._changed:
                self._running.remove(call)
                self._changed.notify_all()
            call.finished.put(call)
