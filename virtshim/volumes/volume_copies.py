"""The copies of volumes that kubelet writes: what guests should have, and what they are known to have."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from virtshim.model.container import Container
from virtshim.model.errors import ShimError
from virtshim.model.ids import ContainerId
from virtshim.system.locks import new_lock
from virtshim.volumes.copies import CopiedVolume, Packed, archive, check_size, copy_name, packed, size_of
from virtshim.volumes.ports import KubeletVolumes

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class VolumeCopies:
    """Remembers the digests of what each guest has, in memory only. After a restart of virtshim or the guest, the guest
    is asked."""

    files: KubeletVolumes
    _lock: threading.Lock = field(default_factory=new_lock)
    _settled: dict[ContainerId, Mapping[str, str]] = field(default_factory=dict)
    _boots: dict[ContainerId, int] = field(default_factory=dict)
    _unreadable: dict[ContainerId, str] = field(default_factory=dict)

    def check(self, copies: Sequence[CopiedVolume]) -> None:
        """Raises ShimError if a volume does not exist or is too large."""
        check_size(sum(size_of(self.files.read(volume)) for volume in copies))

    def seed(self, copies: Sequence[CopiedVolume]) -> bytes:
        """An archive of the volumes as they are now, b"" if none is mounted. Raises ShimError."""
        if all(volume.written for volume in copies):
            return b""
        return archive(packed(copy_name(at), self.files.read(volume)) for at, volume in enumerate(copies))

    def now(self, container: Container) -> Mapping[str, Packed]:
        """The container's volumes as they are on the node, by their names in the guest. Volumes that cannot be read, or
        that no longer fit, are left out."""
        found = {}
        why, total = "", 0
        for at, volume in enumerate(container.spec.copies):
            try:
                entries = self.files.read(volume)
                check_size(total + size_of(entries))
            except ShimError as exc:
                why = str(exc)
                continue
            total += size_of(entries)
            found[copy_name(at)] = packed(copy_name(at), entries)
        self._tell(container.id, why)
        return found

    def stale(self, container: Container, now: Mapping[str, Packed], there: Mapping[str, str]) -> list[Packed]:
        """The volumes that must be sent to the guest. `there`: the digests of what it has."""
        renewed = {copy_name(at) for at, volume in enumerate(container.spec.copies) if volume.renewed}
        return [
            one for name, one in now.items() if there.get(name) != one.digest and (name in renewed or name not in there)
        ]

    def known(self, container: ContainerId) -> Mapping[str, str] | None:
        """The digests of what the guest is thought to have; None if unknown."""
        with self._lock:
            return self._settled.get(container)

    def boot(self, container: ContainerId) -> int:
        """A number that changes with each `forget`."""
        with self._lock:
            return self._boots.get(container, 0)

    def settle(self, container: ContainerId, now: Mapping[str, Packed], boot: int) -> None:
        """Notes that the guest has these volumes, or cannot take them, so that nothing is sent before they change.
        `boot`: the number from before the guest was asked; if the guest restarted since, it has lost them."""
        with self._lock:
            if boot == self._boots.get(container, 0):
                self._settled[container] = {name: one.digest for name, one in now.items()}

    def is_settled(self, container: Container, now: Mapping[str, Packed]) -> bool:
        with self._lock:
            known = self._settled.get(container.id)
        return known is not None and not self.stale(container, now, known)

    def forget(self, container: ContainerId) -> None:
        """Forgets what the guest has."""
        with self._lock:
            self._settled.pop(container, None)
            self._boots[container] = self._boots.get(container, 0) + 1

    def keep(self, containers: Collection[ContainerId]) -> None:
        """Forgets all other containers."""
        with self._lock:
            for known in (self._settled, self._boots, self._unreadable):
                for gone in [one for one in known if one not in containers]:
                    known.pop(gone, None)

    def _tell(self, container: ContainerId, why: str) -> None:
        """Logs the reason once, until it changes."""
        with self._lock:
            before = self._unreadable.get(container, "")
            self._unreadable[container] = why
        if why and why != before:
            log.warning("volumes.copy.unreadable", container=container.short, error=why)
