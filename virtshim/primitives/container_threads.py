"""A thread for each container that something is done for in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

from virtshim.domain.ids import ContainerId
from virtshim.primitives.threads import started

log = structlog.get_logger(__name__)

# Seconds that all of them together get to end.
_CLOSE: Final = 5.0


class ContainerThreads:
    """`name`: what the threads' names begin with."""

    def __init__(self, name: str) -> None:
        self._name = name
        # What runs in a thread looks at this, and ends soon after it is set.
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._threads: dict[ContainerId, threading.Thread] = {}
        self._again: dict[ContainerId, Callable[[], None]] = {}

    def start(
        self, container: ContainerId, run: Callable[[], None], *, beside_earlier: bool = False, again: bool = False
    ) -> None:
        """Nothing happens after `close`, nor if one of that container runs: unless `beside_earlier` is set, or `again`, which has
        `run` follow it."""
        # Its lines in the log belong to the call that has begun it, but are not that call's own.
        bound = {key: value for key, value in structlog.contextvars.get_contextvars().items() if key != "rpc"}
        thread = threading.Thread(
            target=self._run, args=(container, run, bound), name=f"{self._name}-{container.short}", daemon=True
        )
        with self._lock:
            if again and container in self._threads:
                self._again[container] = run
            elif not self.closing.is_set() and (beside_earlier or container not in self._threads):
                self._threads[container] = started(thread)

    def of(self, container: ContainerId) -> threading.Thread | None:
        with self._lock:
            return self._threads.get(container)

    def close(self) -> None:
        """Waits for them, but not for one that hangs."""
        self.closing.set()
        with self._lock:
            threads = tuple(self._threads.values())
        until = time.monotonic() + _CLOSE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, container: ContainerId, run: Callable[[], None], bound: Mapping[str, Any]) -> None:
        due: Callable[[], None] | None = run
        while due is not None:
            try:
                with structlog.contextvars.bound_contextvars(**bound):
                    due()
            except Exception:  # the edge of a thread: what was asked for meanwhile is due all the same
                log.exception("container.thread_crashed", thread=self._name, container=container.short)
            finally:
                due = self._next(container)

    def _next(self, container: ContainerId) -> Callable[[], None] | None:
        """What was asked for meanwhile. Looked at and forgotten under one lock: who asks later starts a thread."""
        with self._lock:
            if self._threads.get(container) is not threading.current_thread():
                return None
            again = self._again.pop(container, None)
            if again is not None and not self.closing.is_set():
                return again
            del self._threads[container]
            return None
