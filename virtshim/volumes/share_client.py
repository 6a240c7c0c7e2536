"""Asks the share program to serve VMs' volumes. Implements `virtshim.volumes.ports.VmShares`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tapmanager.fields import BadField, Json, as_object
from virtshim.model.cgroup import DEFAULT_PARENT, parent_path
from virtshim.model.container import Container
from virtshim.pods.tapmanager_connection import TapmanagerConnection
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

    def start(self, container: Container, cgroup_parent: str, timeout: float) -> None:
        args = {
            "directory": self._directory,
            "container": container.id.value,
            "uid": container.spec.uid or self._qemu_uid(),
            "parent": parent_path(cgroup_parent) or DEFAULT_PARENT,
            "mounts": _mounts(container.spec.volumes),
        }
        self._program.tell("share", args, timeout, f"serving the volumes of container {container.id.short}")

    def end(self, name: str, timeout: float) -> None:
        args = {"directory": self._directory, "name": name}
        self._program.tell("unshare", args, timeout, f"taking the volumes of container {name} back")

    def served(self, timeout: float) -> Mapping[str, bool]:
        return self._program.ask(
            "list", {"directory": self._directory}, timeout, "looking at the VMs' volumes", _served
        )


def _mounts(volumes: Sequence[SharedVolume]) -> list[Mapping[str, object]]:
    return [{"host_path": one.host, "readonly": one.readonly, "follows": one.follows} for one in volumes]


def _served(answer: Json) -> Mapping[str, bool]:
    found = as_object(answer.get("shares"), "shares")
    if not all(isinstance(alive, bool) for alive in found.values()):
        raise BadField("shares: must be true or false for each")
    return {name: alive is True for name, alive in found.items()}
