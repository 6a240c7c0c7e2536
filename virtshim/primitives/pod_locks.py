"""One lock a pod."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from virtshim.domain.ids import SandboxId


class PodLocks:
    """Calls that change one pod take turns; pods never wait for each other. Re-entrant within a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[SandboxId, tuple[threading.RLock, int]] = {}

    def is_busy(self, sandbox: SandboxId) -> bool:
        """Whether a call has the pod, or waits for it."""
        with self._lock:
            return sandbox in self._locks

    @contextmanager
    def held(self, sandbox: SandboxId) -> Iterator[None]:
        with self._known(sandbox) as lock, lock:
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
    def _known(self, sandbox: SandboxId) -> Iterator[threading.RLock]:
        with self._lock:
            lock, users = self._locks.get(sandbox, (threading.RLock(), 0))
            self._locks[sandbox] = (lock, users + 1)
        try:
            yield lock
        finally:
            with self._lock:
                lock, users = self._locks[sandbox]
                if users == 1:
                    del self._locks[sandbox]
                else:
                    self._locks[sandbox] = (lock, users - 1)
