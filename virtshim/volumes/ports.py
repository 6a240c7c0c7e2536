"""Volumes that are disks in the guest, as they lie on the node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from virtshim.model.container import Container
from virtshim.volumes.copies import CopiedVolume, Entry
from virtshim.volumes.memory_volumes import Tmpfs
from virtshim.volumes.shares import SharedVolume

# The volumes whose files kubelet writes, and those that it makes empty.


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


# The daemons that serve volumes to VMs.


class VmShares(Protocol):
    """One for each VM that has volumes, by way of the share program. Errors: Unavailable (it does not answer, or there is no
    virtiofsd), InvalidRequest, NotFound (of a volume, with its path), DeadlineExceeded (a volume does not answer), WrongState (it
    does not end), InternalError."""

    def check(self, volumes: Sequence[SharedVolume], timeout: float) -> None:
        """Whether each is there, and can be shared."""

    def start(self, container: Container, cgroup_parent: str, timeout: float) -> None:
        """Its VM, and no other, can reach the container's volumes from now on. `cgroup_parent`: its pod's
        cgroup, as the pod gave it. After an error nothing is left of it."""

    def end(self, name: str, timeout: float) -> None:
        """`name`: the container's short id. Nothing holds its volumes any more. No error if there is none."""

    def served(self, timeout: float) -> Mapping[str, bool]:
        """Short id of each container that there is anything of -> whether its volumes are served."""


class VolumeDiskFiles(Protocol):
    """No link in a volume is followed."""

    def flex_options(self, directory: str) -> bytes:
        """What the flexVolume driver has written into a volume's directory. Raises NotFound, InvalidRequest (no regular file, or
        too large), InternalError."""

    def image(self, directory: str, *, readonly: bool) -> str:
        """Who the disk's image in a volume is: the same for all names that the node has for it. Raises NotFound, InvalidRequest
        (no regular file, an empty one, or not to be written), InternalError."""
