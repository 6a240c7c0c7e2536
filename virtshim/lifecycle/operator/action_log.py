"""What operators have done to VMs: logged, remembered for a while, and told to who follows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import structlog

from virtshim.domain.container import Container
from virtshim.domain.guest.operation import Action, ActionTaken
from virtshim.ports.clock import Clock
from virtshim.ports.records import Records

log = structlog.get_logger(__name__)

# A long day of an operator's. virtshim's log has them all.
_REMEMBERED: Final = 500


class ActionLog:
    """Thread-safe. In memory."""

    def __init__(self, records: Records, clock: Clock) -> None:
        self._records = records
        self._clock = clock
        self._changed = threading.Condition()
        self._taken: deque[ActionTaken] = deque(maxlen=_REMEMBERED)
        self._count = 0
        self._closed = False

    def add(self, action: Action, container: Container, message: str) -> None:
        sandbox = self._records.sandboxes.get(container.sandbox_id)
        namespace, pod = (sandbox.key.namespace, sandbox.key.name) if sandbox else ("", "")
        taken = ActionTaken(self._clock.now_ns(), action, container.id, container.sandbox_id, namespace, pod, message)
        log.info(
            "vm.operated", action=action.value, container=container.id.short, pod=f"{namespace}/{pod}", message=message
        )
        with self._changed:
            self._taken.append(taken)
            self._count += 1
            self._changed.notify_all()

    def since(self, at: int) -> Sequence[ActionTaken]:
        """Those after that time that are remembered, oldest first."""
        with self._changed:
            return [taken for taken in self._taken if taken.at > at]

    def follow(self, at: int, left: threading.Event) -> Iterator[ActionTaken]:
        """Those after that time, and then each as it happens, until `left` is set and `wake` called, or `close`. One who falls
        far behind misses some."""
        with self._changed:
            seen, waiting = self._count, [taken for taken in self._taken if taken.at > at]
        while True:
            yield from waiting
            with self._changed:
                self._changed.wait_for(lambda: self._count > seen or self._closed or left.is_set())  # noqa: B023
                if self._closed or left.is_set():
                    return
                missed = min(self._count - seen, len(self._taken))
                waiting, seen = list(self._taken)[len(self._taken) - missed :], self._count

    def wake(self) -> None:
        """Somebody who follows has left."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody follows any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
