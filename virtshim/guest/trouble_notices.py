"""Reports when a trouble of a running VM begins and ends, by a line in the container's log and by an Event of the pod.

kubelet copies a container's message only when the container has ended, so users of `kubectl` learn of a trouble only
in this way. The report comes before the record: if virtshim is killed in between, it reports the change again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.containers.logs import ContainerLogs
from virtshim.kubeapi.ports import PodEvents, event_of
from virtshim.model.container import Container
from virtshim.model.errors import ShimError
from virtshim.model.ids import ContainerId
from virtshim.model.troubles import Trouble, changes
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.locks import new_lock
from virtshim.system.rate_limits import TroubleLog

log = structlog.get_logger(__name__)

_OVER: Final = "container.trouble.reported_again"


@dataclass(slots=True)
class TroubleNotices:
    records: Records
    logs: ContainerLogs
    events: PodEvents
    clock: Clock
    _lock: threading.Lock = field(default_factory=new_lock)
    _reported: dict[ContainerId, tuple[Trouble, ...]] = field(default_factory=dict)
    """The troubles that each log reports so far, for logs that could not be written, mostly because a file system is
    full."""
    _failures: TroubleLog = field(default_factory=lambda: TroubleLog(log, _OVER))

    def notice(self, container: Container, now: tuple[Trouble, ...]) -> None:
        """`container`: as recorded; its recorded troubles have been reported. `now`: the troubles that will be
        recorded next. Called with the pod's lock held; never raises, and waits for nobody but the log's disk."""
        self._tell_the_cluster(container, now)
        with self._lock:
            reported = self._reported.get(container.id, container.status.troubles)
        if reported == now:
            self._forget(container.id)
            return
        try:
            for change in changes(reported, now):
                self.logs.note(container, change.line)
        except ShimError as exc:
            self._failures.met(
                "container.trouble.not_reported", key=container.id, container=container.id.short, error=str(exc)
            )
            self._owe(container.id, reported)
            return
        self._failures.over(key=container.id, container=container.id.short)
        self._forget(container.id)

    def owes(self, container: Container) -> bool:
        """Whether its log lacks a line, which `notice` tries to write again."""
        with self._lock:
            return container.id in self._reported

    def _tell_the_cluster(self, container: Container, now: Sequence[Trouble]) -> None:
        """Sends an Event for each change once, whether or not the log can be written."""
        if container.status.troubles == now:
            return
        pod = self.records.sandboxes.get(container.sandbox_id)
        if pod is None:
            return
        for change in changes(container.status.troubles, now):
            self.events.tell(event_of(change, pod.key, container.name.name, self.clock.now_ns()))

    def _owe(self, container: ContainerId, reported: tuple[Trouble, ...]) -> None:
        running = {one.id for one in self.records.containers.all() if one.is_running}
        with self._lock:
            self._reported[container] = reported
            self._reported = {one: last for one, last in self._reported.items() if one in running}
        self._failures.retain_only(running)

    def _forget(self, container: ContainerId) -> None:
        with self._lock:
            self._reported.pop(container, None)
