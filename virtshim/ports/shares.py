"""The daemons that serve volumes to VMs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from virtshim.domain.container import Container
from virtshim.domain.volumes.shares import SharedVolume


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
