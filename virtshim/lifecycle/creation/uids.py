"""A user id for each VM: what one QEMU owns, no other may open, signal or trace."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator

from virtshim.domain.errors import ResourceExhausted
from virtshim.ports.records import Records


class VmUids:
    """`count` ids from `first` on; 0: all VMs run as libvirt's one user. One is taken as long as a record has it, or it is
    `in_use`: by a process or a file that outlived its record."""

    def __init__(self, records: Records, first: int, count: int, in_use: Callable[[], Collection[int]]) -> None:
        self._records = records
        self._first = first
        self._count = count
        self._in_use = in_use
        self._lock = threading.Lock()
        self._last = first - 1

    @contextlib.contextmanager
    def free(self) -> Iterator[int]:
        """One that is free, for the record that is written inside the block; 0 where VMs have none. Raises ResourceExhausted."""
        if not self._count:
            yield 0
            return
        with self._lock:
            self._last = self._next()
            yield self._last

    def _next(self) -> int:
        """The one after the last: one that became free rests as long as there are others."""
        records = self._records.containers.all()
        taken = {record.spec.uid for record in records} | set(self._in_use())
        begin = max((self._last, *(record.spec.uid for record in records))) + 1 - self._first
        for step in range(self._count):
            uid = self._first + (begin + step) % self._count
            if uid not in taken:
                return uid
        raise ResourceExhausted(
            f"all {self._count} user ids from {self._first} on are taken by VMs; raise libvirt.vm_uids"
        )
