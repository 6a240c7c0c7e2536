"""Which guests have shut their VMs down: empty files, one a VM, named by its UUID.

libvirt remembers why a VM is off in memory. The embedded one dies with this process, and the next takes a VM that ended before
that was recorded for one that crashed, or knows nothing. Nothing is synced: what a killed process has written is there.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Collection


class GuestEnds:
    """`directory` "" keeps nothing. Thread-safe; raises nothing: without its file an end is as unknown as libvirt says."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        # Of an earlier process.
        self._before = set(self._listed())

    def add(self, domain: uuid.UUID) -> None:
        """Called on libvirt's event thread."""
        if self._directory:
            with contextlib.suppress(OSError):
                os.makedirs(self._directory, mode=0o700, exist_ok=True)
                os.close(os.open(self._path(domain), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def forget(self, domain: uuid.UUID) -> None:
        """What is known is of an earlier run."""
        self._before.discard(domain)
        if self._directory:
            with contextlib.suppress(OSError):
                os.unlink(self._path(domain))

    def has(self, domain: uuid.UUID) -> bool:
        """Whether its guest did, as an earlier process saw."""
        return domain in self._before

    def keep(self, there: Collection[uuid.UUID]) -> None:
        """Of VMs that are gone nobody asks."""
        for domain in self._listed():
            if domain not in there:
                self.forget(domain)

    def _listed(self) -> list[uuid.UUID]:
        found = []
        if self._directory:
            with contextlib.suppress(OSError):
                for name in os.listdir(self._directory):
                    with contextlib.suppress(ValueError):
                        found.append(uuid.UUID(name))
        return found

    def _path(self, domain: uuid.UUID) -> str:
        return os.path.join(self._directory, str(domain))
