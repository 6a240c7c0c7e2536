"""The volumes whose files kubelet writes, and those that it makes empty."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from virtshim.domain.volumes.copies import CopiedVolume, Entry
from virtshim.domain.volumes.memory_volumes import Tmpfs


class KubeletVolumes(Protocol):
    """On the node. No link in a volume is followed out of it."""

    def is_part(self, host_path: str, pod_uid: str) -> bool:
        """Whether it is a part (subPath) of such a volume of that pod."""

    def read(self, volume: CopiedVolume) -> tuple[Entry, ...]:
        """All of it, as it was at one moment. Raises NotFound, InvalidRequest (too large; a socket, FIFO or device in it),
        Unavailable (it changes all the time), InternalError."""

    def empty_tmpfs(self, host_path: str) -> Tmpfs:
        """Of an emptyDir with medium Memory in which nothing is. Raises NotFound, InvalidRequest (of another medium), WrongState
        (something is in it), InternalError."""

    def changed(self, hosts: Collection[str], timeout: float) -> Collection[str]:
        """Waits so many seconds at most until something has changed in one of these directories, and tells in which; those that
        were not asked about the last time are among them. One thread."""
