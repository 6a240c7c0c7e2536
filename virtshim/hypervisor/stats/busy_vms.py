"""VMs that libvirt is starting or ending for us."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections import Counter
from collections.abc import Collection, Iterator


class BusyVms:
    """While libvirt starts or ends a VM it holds it locked, in parts for as long as that takes: whoever asks about it waits.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Counter[uuid.UUID] = Counter()

    @contextlib.contextmanager
    def held(self, domain: uuid.UUID) -> Iterator[None]:
        with self._lock:
            self._held[domain] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[domain] -= 1
                if not self._held[domain]:
                    del self._held[domain]

    def others(self, domains: Collection[uuid.UUID]) -> list[uuid.UUID]:
        """Those of `domains` that can be asked about."""
        with self._lock:
            return [domain for domain in domains if domain not in self._held]
