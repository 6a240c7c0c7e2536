"""Share daemons that a test can inspect and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from virtshim.model.container import Container
from virtshim.model.errors import InvalidRequest, NotFound, ShimError, Unavailable
from virtshim.volumes.shares import SharedVolume


class FakeVmShares:
    """Implements `virtshim.volumes.ports.VmShares`. `missing`: paths of the node that are not there. `hugetlbfs`: those that
    are such file systems. `dead`: daemons that have ended by themselves."""

    def __init__(self) -> None:
        self.shares: dict[str, tuple[SharedVolume, ...]] = {}
        self.missing: set[str] = set()
        self.hugetlbfs: set[str] = set()
        self.dead: set[str] = set()
        self.gone = False
        self.error: ShimError | None = None

    def check(self, volumes: Sequence[SharedVolume], timeout: float) -> None:
        self._reach()
        for volume in volumes:
            if volume.host in self.missing:
                raise NotFound(f"{volume.host} does not exist on the node; create it, or correct the volume")
            if volume.host in self.hugetlbfs:
                raise InvalidRequest(
                    f"{volume.host} is a hugetlbfs; remove the volume: resources.limits has huge pages"
                )

    def start(self, container: Container, cgroup_parent: str, timeout: float) -> None:
        self._reach()
        self.check(container.spec.volumes, timeout)
        self.shares[container.id.short] = container.spec.volumes
        self.dead.discard(container.id.short)

    def end(self, name: str, timeout: float) -> None:
        self._reach()
        if self.error is not None:
            raise self.error
        self.shares.pop(name, None)

    def served(self, timeout: float) -> Mapping[str, bool]:
        self._reach()
        return {name: name not in self.dead for name in self.shares}

    def _reach(self) -> None:
        if self.gone:
            raise Unavailable("the share program cannot be reached")
