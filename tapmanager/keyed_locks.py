"""One lock per sandbox: calls for the same sandbox wait for each other, calls for different ones do not."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from tapmanager.errors import deadline


class KeyedLocks:
    """One lock per key. Unused locks are removed."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def holding(self, key: str, until: float) -> Iterator[None]:
        """Holds the key's lock within the block. Raises TapmanagerError (deadline) if another call still holds it at `until`."""
        with self._guard:
            lock, users = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, users + 1)
        try:
            if not lock.acquire(timeout=max(0.0, until - time.monotonic())):
                raise deadline(f"another call for sandbox {key} did not end in time")
            try:
                yield
            finally:
                lock.release()
        finally:
            with self._guard:
                lock, users = self._locks[key]
                if users == 1:
                    del self._locks[key]
                else:
                    self._locks[key] = (lock, users - 1)
