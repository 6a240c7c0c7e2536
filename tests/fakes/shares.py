"""Share daemons that a test can inspect and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from virtshim.model.container import Container
from virtshim.model.errors import InvalidRequest, NotFound, ShimError, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.volumes.ports import VmNetwork
from virtshim.volumes.shares import SharedVolume


class FakeVmShares:
    """Implements `virtshim.volumes.ports.VmShares`. `missing`: paths of the node that are not there. `hugetlbfs`: those that
    are such file systems. `dead`: daemons that have ended by themselves. `networks`: what each passt got. `cut_off`: passts
    that have ended by themselves. `held_ports`: those of other containers. `without_passt`: it is not installed."""

    def __init__(self) -> None:
        self.shares: dict[str, tuple[SharedVolume, ...]] = {}
        self.missing: set[str] = set()
        self.hugetlbfs: set[str] = set()
        self.dead: set[str] = set()
        self.networks: dict[str, VmNetwork] = {}
        self.cut_off: set[str] = set()
        self.held_ports: set[int] = set()
        self.without_passt = False
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

    def check_passt(self, timeout: float) -> None:
        self._reach()
        if self.without_passt:
            raise Unavailable("passt is missing at /usr/bin/passt; install the package passt, or set shares.passt")

    def start(self, container: Container, cgroup_parent: str, timeout: float, network: VmNetwork | None = None) -> None:
        self._reach()
        self.check(container.spec.volumes, timeout)
        name = container.id.short
        if network is not None:
            self.check_passt(timeout)
            for port in (*network.ports.tcp, *network.ports.udp):
                if port in self.held_ports:
                    raise WrongState(f"port {port}/tcp of the pod is held by another of its containers")
            self.networks[name] = network
        self.shares[name] = container.spec.volumes
        self.dead.discard(name)
        self.cut_off.discard(name)

    def end(self, name: str, timeout: float) -> None:
        self._reach()
        if self.error is not None:
            raise self.error
        self.shares.pop(name, None)
        self.networks.pop(name, None)

    def served(self, timeout: float) -> Mapping[str, bool]:
        self._reach()
        return {name: name not in self.dead for name in self.shares}

    def connected(self, timeout: float) -> Mapping[str, bool]:
        self._reach()
        return {name: name not in self.cut_off for name in self.networks}

    def passt_socket(self, container: ContainerId) -> str:
        return f"/run/shares/{container.short}/net/sock"

    def _reach(self) -> None:
        if self.gone:
            raise Unavailable("the share program cannot be reached")
