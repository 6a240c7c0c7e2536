"""Locks of pods, and calls that their repeats join."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Generic, TypeVar

from virtshim.model.errors import Aborted, AlreadyExists, DeadlineExceeded, ShimError
from virtshim.model.ids import SandboxId


def new_lock() -> threading.Lock:
    """For a field of a dataclass, which would keep `threading.Lock` as it was at its import. Tests replace that, so that they
    see each lock."""
    return threading.Lock()


class LeaveOff(threading.Event):
    """Set when a call should give up."""

    def __init__(self) -> None:
        super().__init__()
        self._acting = threading.Lock()
        self._acts: list[Callable[[], None]] = []

    def set(self) -> None:
        super().set()
        with self._acting:
            for act in self._acts:
                act()

    @contextmanager
    def calling(self, act: Callable[[], None]) -> Iterator[None]:
        """Calls `act` as soon as this is set within the block, to wake a call that waits for something else. `act` may be called
        twice, but never after the block."""
        with self._acting:
            self._acts.append(act)
        try:
            if self.is_set():
                act()
            yield
        finally:
            with self._acting:
                self._acts.remove(act)

    @contextmanager
    def within(self, seconds: float) -> Iterator[LeaveOff]:
        """Yields an event that is set together with this one, or when the time is over."""
        over = LeaveOff()
        timer = threading.Timer(max(0.0, seconds), over.set)
        timer.daemon = True
        timer.start()
        try:
            with self.calling(over.set):
                yield over
        finally:
            timer.cancel()

    @contextmanager
    def explained(self, why: str) -> Iterator[None]:
        """If the block fails while this is set, raises Aborted with the text `why` instead."""
        try:
            yield
        except ShimError as exc:
            if self.is_set():
                raise Aborted(why) from exc
            raise


class PodLocks:
    """One lock for each sandbox, and one for what all sandboxes of a pod share. Calls that change a pod take turns; pods
    never wait for each other. Re-entrant within a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[SandboxId | str, tuple[threading.RLock, int]] = {}
        # The event of a call that waits for the guest, and the number of calls that wait to end the VM.
        self._waits: dict[SandboxId, LeaveOff] = {}
        self._ends = Counter[SandboxId]()

    def is_busy(self, sandbox: SandboxId) -> bool:
        """Whether a call has the lock, or waits for it."""
        with self._lock:
            return sandbox in self._locks

    @contextmanager
    def held(self, sandbox: SandboxId) -> Iterator[None]:
        with self._known(sandbox) as lock, lock:
            yield

    @contextmanager
    def held_for_all(self, pod: str) -> Iterator[None]:
        """The lock for all sandboxes of the pod with this `pod_hash`, or for all containers of the VM that outlives its pods
        (`owner_of` its disk). While it is held, none of them is recorded, so that their disks can be removed. Taken after a
        sandbox's own lock, never before. Held only for a moment, unless the VM is copied to or from its state volume, or moves
        while it is off."""
        with self._known(pod) as lock, lock:
            yield

    @contextmanager
    def held_soon(self, whose: SandboxId | str, seconds: float) -> Iterator[bool]:
        """`held` or `held_for_all`. Yields False, without the lock, if the time is over."""
        with self._known(whose) as lock:
            held = lock.acquire(timeout=max(0.0, seconds))
            try:
                yield held
            finally:
                if held:
                    lock.release()

    @contextmanager
    def held_while_waiting(self, sandbox: SandboxId) -> Iterator[LeaveOff]:
        """Like `held`, for a call that waits for the guest, for another node or for a volume. The call must stop waiting when the
        event is set. Not within `held`."""
        with self.held(sandbox):
            leave_off = LeaveOff()
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
        """Like `held`, for a call that ends the VM. Stops calls that wait as `held_while_waiting` says."""
        with self._lock:
            self._ends[sandbox] += 1
            waits = self._waits.get(sandbox)
        try:
            if waits is not None:
                waits.set()
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
    """One running call per key. kubelet abandons a call at its deadline and repeats it: the first call continues, and the repeat
    gets its result. If the repeat's `what` differs, that is AlreadyExists."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Hashable, tuple[object, Future[R]]] = {}

    def run(self, key: Hashable, what: object, call: Callable[[], R], timeout: float) -> R:
        """Runs `call`, or waits up to `timeout` seconds for the running one."""
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
