"""One running call per key.

kubelet gives a call up at its deadline and repeats it. The first goes on; the repeat joins it and gets its result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Generic, TypeVar

from virtshim.domain.errors import AlreadyExists, DeadlineExceeded

R = TypeVar("R")


class Inflight(Generic[R]):
    """`what` is compared between a running call and its repeat: same key with something different is AlreadyExists."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Hashable, tuple[object, Future[R]]] = {}

    def run(self, key: Hashable, what: object, call: Callable[[], R], timeout: float) -> R:
        """Runs `call`, or waits up to `timeout` seconds for the one that runs already."""
        mine: Future[R] = Future()
        with self._lock:
            running = self._running.setdefault(key, (what, mine))
        if running[1] is not mine:
            return self._join(key, what, running, timeout)
        try:
            result = call()
        except BaseException as exc:
            self._forget(key)
            mine.set_exception(exc)
            raise
        self._forget(key)
        mine.set_result(result)
        return result

    def is_running(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._running

    def _join(self, key: Hashable, what: object, running: tuple[object, Future[R]], timeout: float) -> R:
        if running[0] != what:
            raise AlreadyExists(f"{key} is being made with a different configuration; remove it first or wait")
        try:
            return running[1].result(timeout=timeout)
        except FutureTimeout as exc:
            raise DeadlineExceeded(f"{key} is still being made by an earlier call; repeat this one") from exc

    def _forget(self, key: Hashable) -> None:
        with self._lock:
            del self._running[key]
