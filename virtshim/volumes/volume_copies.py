"""The copies of what kubelet writes: what guests are to have, and which of it they are known to have."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from virtshim.model.container import Container
from virtshim.model.errors import ShimError
from virtshim.model.ids import ContainerId
from virtshim.volumes.copies import CopiedVolume, Packed, archive, check_size, copy_name, packed, size_of
from virtshim.volumes.ports import KubeletVolumes

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class VolumeCopies:
    """What a guest has is remembered as digests, in memory alone: the guest itself is asked after a restart of either."""

    files: KubeletVolumes
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _settled: dict[ContainerId, Mapping[str, str]] = field(default_factory=dict)
    _boots: dict[ContainerId, int] = field(default_factory=dict)
    _unreadable: dict[ContainerId, str] = field(default_factory=dict)

    def check(self, copies: Sequence[CopiedVolume]) -> None:
        """Whether each is there, and not too large. Raises ShimError."""
        check_size(sum(size_of(self.files.read(volume)) for volume in copies))

    def seed(self, copies: Sequence[CopiedVolume]) -> bytes:
        """An archive of them as they are now, b"" if none of them is mounted. Raises ShimError."""
        if all(volume.written for volume in copies):
            return b""
        return archive(packed(copy_name(at), self.files.read(volume)) for at, volume in enumerate(copies))

    def now(self, container: Container) -> Mapping[str, Packed]:
        """Its volumes as they are on the node, by their names in the guest. One that cannot be read is left out, and what has
        become too much."""
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
        """Those that its guest has to be given. `there`: the digests of what it has."""
        renewed = {copy_name(at) for at, volume in enumerate(container.spec.copies) if volume.renewed}
        return [
            one for name, one in now.items() if there.get(name) != one.digest and (name in renewed or name not in there)
        ]

    def known(self, container: ContainerId) -> Mapping[str, str] | None:
        """The digests of what its guest is thought to have; None if nothing is known."""
        with self._lock:
            return self._settled.get(container)

    def boot(self, container: ContainerId) -> int:
        """Another number after each `forget`."""
        with self._lock:
            return self._boots.get(container, 0)

    def settle(self, container: ContainerId, now: Mapping[str, Packed], boot: int) -> None:
        """The guest has these, or cannot be given them: nothing is done before they change. `boot`: the number of before it was
        asked; a guest that was restarted meanwhile has lost them."""
        with self._lock:
            if boot == self._boots.get(container, 0):
                self._settled[container] = {name: one.digest for name, one in now.items()}

    def is_settled(self, container: Container, now: Mapping[str, Packed]) -> bool:
        with self._lock:
            known = self._settled.get(container.id)
        return known is not None and not self.stale(container, now, known)

    def forget(self, container: ContainerId) -> None:
        """What the guest has is not known any more."""
        with self._lock:
            self._settled.pop(container, None)
            self._boots[container] = self._boots.get(container, 0) + 1

    def keep(self, containers: Collection[ContainerId]) -> None:
        """Nothing need be known of others any more."""
        with self._lock:
            for known in (self._settled, self._boots, self._unreadable):
                for gone in [one for one in known if one not in containers]:
                    known.pop(gone, None)

    def _tell(self, container: ContainerId, why: str) -> None:
        """Once, as long as it is the same."""
        with self._lock:
            before = self._unreadable.get(container, "")
            self._unreadable[container] = why
        if why and why != before:
            log.warning("volumes.copy.unreadable", container=container.short, error=why)
