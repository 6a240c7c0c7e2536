"""Threads for what waits for guests on behalf of sessions: a few for each VM, so that a silent one keeps nobody else waiting."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from virtshim.domain.errors import ResourceExhausted
from virtshim.domain.ids import ContainerId
from virtshim.primitives.threads import Workers

R = TypeVar("R")

# Of one VM at the same time, which speaks with one caller at a time anyway; what waits for them; of all VMs together.
OF_VM: Final = 8
WAITING: Final = 256
_OF_NODE: Final = 4096


class VmWorkers:
    """Threads are made as they are needed, and used again."""

    def __init__(self) -> None:
        self._executor = Workers(_OF_NODE, "guest-exec")
        self._lock = threading.Lock()
        self._busy: dict[ContainerId, int] = {}
        self._waiting: dict[ContainerId, deque[Callable[[], None]]] = {}

    def submit(self, container: ContainerId, call: Callable[..., R], *args: Any) -> Future[R]:
        """In their order, one VM's. Raises ResourceExhausted if too many wait."""
        future: Future[R] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*args))
                except BaseException as exc:  # noqa: BLE001  the one who waits for it is told
                    future.set_exception(exc)

        with self._lock:
            if self._busy.get(container, 0) >= OF_VM:
                waiting = self._waiting.setdefault(container, deque())
                if len(waiting) >= WAITING:
                    raise ResourceExhausted(
                        f"{WAITING} requests wait for the guest of container {container.short}; wait for some to end, and see "
                        "whether its guest agent answers"
                    )
                waiting.append(work)
                return future
            self._busy[container] = self._busy.get(container, 0) + 1
        self._executor.submit(self._run, container, work)
        return future

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, container: ContainerId, work: Callable[[], None]) -> None:
        """Until nothing of this VM waits."""
        while True:
            work()
            with self._lock:
                waiting = self._waiting.get(container)
                if not waiting:
                    self._waiting.pop(container, None)
                    self._busy[container] -= 1
                    if not self._busy[container]:
                        del self._busy[container]
                    return
                work = waiting.popleft()
