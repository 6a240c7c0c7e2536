"""Asks the share program to serve VMs' volumes, and their network by passt. Implements `virtshim.volumes.ports.VmShares`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tapmanager.fields import BadField, Json, as_object
from virtshim.model.cgroup import DEFAULT_PARENT, parent_path
from virtshim.model.container import Container
from virtshim.model.ids import ContainerId
from virtshim.model.layout import passt_socket
from virtshim.pods.tapmanager_connection import TapmanagerConnection
from virtshim.volumes.ports import VmNetwork
from virtshim.volumes.shares import SharedVolume


class VmShareClient:
    """`directory`: holds a directory for each VM's share. `qemu_uid`: the user of VMs that have no user id of their
    own."""

    def __init__(self, program: TapmanagerConnection, directory: str, qemu_uid: Callable[[], int]) -> None:
        self._program = program
        self._directory = directory
        self._qemu_uid = qemu_uid

    def check(self, volumes: Sequence[SharedVolume], timeout: float) -> None:
        self._program.tell("check", {"mounts": _mounts(volumes)}, timeout, "looking at the pod's volumes")

    def check_passt(self, timeout: float) -> None:
        self._program.tell("passt", {}, timeout, "looking for passt")

    def start(self, container: Container, cgroup_parent: str, timeout: float, network: VmNetwork | None = None) -> None:
        args = {
            "directory": self._directory,
            "container": container.id.value,
            "uid": container.spec.uid or self._qemu_uid(),
            "parent": parent_path(cgroup_parent) or DEFAULT_PARENT,
            "mounts": _mounts(container.spec.volumes),
            **({"network": _network(network, container.spec.passt_uid)} if network else {}),
        }
        what = "volumes and network" if network else "volumes"
        self._program.tell("share", args, timeout, f"serving the {what} of container {container.id.short}")

    def end(self, name: str, timeout: float) -> None:
        args = {"directory": self._directory, "name": name}
        self._program.tell("unshare", args, timeout, f"taking the volumes of container {name} back")

    def served(self, timeout: float) -> Mapping[str, bool]:
        return self._program.ask(
            "list", {"directory": self._directory}, timeout, "looking at the VMs' volumes", _served
        )

    def connected(self, timeout: float) -> Mapping[str, bool]:
        return self._program.ask(
            "list", {"directory": self._directory}, timeout, "looking at the VMs' passts", _connected
        )

    def passt_socket(self, container: ContainerId) -> str:
        return passt_socket(self._directory, container)


def _mounts(volumes: Sequence[SharedVolume]) -> list[Mapping[str, object]]:
    return [{"host_path": one.host, "readonly": one.readonly, "follows": one.follows} for one in volumes]


def _network(network: VmNetwork, uid: int) -> Mapping[str, object]:
    pod, dns = network.pod, network.pod.dns
    (nic,) = pod.interfaces
    return {
        "netns": pod.netns,
        "inode": pod.inode,
        "uid": uid,
        "interface": nic.name,
        "addresses": nic.addresses,
        "ports": {"tcp": network.ports.tcp, "udp": network.ports.udp},
        "dns": {"servers": dns.servers, "searches": dns.searches},
    }


def _served(answer: Json) -> Mapping[str, bool]:
    return _flags(answer, "shares")


def _connected(answer: Json) -> Mapping[str, bool]:
    return _flags(answer, "networks")


def _flags(answer: Json, where: str) -> Mapping[str, bool]:
    found = as_object(answer.get(where), where)
    if not all(isinstance(alive, bool) for alive in found.values()):
        raise BadField(f"{where}: must be true or false for each")
    return {name: alive is True for name, alive in found.items()}
