"""One running call per key.

kubelet gives a call up at its deadline and repeats it. The first goes on; the repeat joins it and gets its result.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Generic, TypeVar

from virtshim.model.errors import AlreadyExists, DeadlineExceeded
from virtshim.model.ids import SandboxId

# One lock a sandbox, and one for what all sandboxes of a pod share.


class PodLocks:
    """Calls that change one pod take turns; pods never wait for each other. Re-entrant within a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[SandboxId | str, tuple[threading.RLock, int]] = {}
        # By who waits for a guest; of those who wait to end its VM, how many.
        self._waits: dict[SandboxId, threading.Event] = {}
        self._ends = Counter[SandboxId]()

    def is_busy(self, sandbox: SandboxId) -> bool:
        """Whether a call has the pod, or waits for it."""
        with self._lock:
            return sandbox in self._locks

    @contextmanager
    def held(self, sandbox: SandboxId) -> Iterator[None]:
        with self._known(sandbox) as lock, lock:
            yield

    @contextmanager
    def held_for_all(self, pod: str) -> Iterator[None]:
        """For all sandboxes of the pod whose `pod_hash` that is: none is recorded while its disks go. Taken after a sandbox's
        own lock, never before, and for a moment only."""
        with self._known(pod) as lock, lock:
            yield

    @contextmanager
    def held_soon(self, sandbox: SandboxId, seconds: float) -> Iterator[bool]:
        """False, and not held, if it could not be had within that time."""
        with self._known(sandbox) as lock:
            held = lock.acquire(timeout=seconds)
            try:
                yield held
            finally:
                if held:
                    lock.release()

    @contextmanager
    def held_while_waiting(self, sandbox: SandboxId) -> Iterator[threading.Event]:
        """As `held`, by who waits for the pod's guest, and not within another `held`: it leaves off when the event is set."""
        with self.held(sandbox):
            leave_off = threading.Event()
            with self._lock:
                self._waits[sandbox] = leave_off
                if sandbox in self._ends:
                    leave_off.set()
            try:
                yield leave_off
            finally:
                with self._lock:
                    del self._waits[sandbox]

    @contextmanager
    def held_to_end(self, sandbox: SandboxId) -> Iterator[None]:
        """As `held`, by who is to end the pod's VM: who waits for its guest need not."""
        with self._lock:
            self._ends[sandbox] += 1
            if (waits := self._waits.get(sandbox)) is not None:
                waits.set()
        try:
            with self.held(sandbox):
                yield
        finally:
            with self._lock:
                if self._ends[sandbox] == 1:
                    del self._ends[sandbox]
                else:
                    self._ends[sandbox] -= 1

    @contextmanager
    def _known(self, whose: SandboxId | str) -> Iterator[threading.RLock]:
        with self._lock:
            lock, users = self._locks.get(whose, (threading.RLock(), 0))
            self._locks[whose] = (lock, users + 1)
        try:
            yield lock
        finally:
            with self._lock:
                lock, users = self._locks[whose]
                if users == 1:
                    del self._locks[whose]
                else:
                    self._locks[whose] = (lock, users - 1)


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
