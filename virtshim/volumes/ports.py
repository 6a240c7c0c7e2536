"""Ports to volumes: kubelet's files on the node, the share program, and volumes that are disks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from virtshim.model.container import Container
from virtshim.model.ids import ContainerId
from virtshim.model.network import GuestPorts, PodNetwork
from virtshim.volumes.copies import CopiedVolume, Entry
from virtshim.volumes.memory_volumes import Tmpfs
from virtshim.volumes.shares import SharedVolume

# Volumes whose files kubelet writes, and emptyDirs in memory.


class KubeletVolumes(Protocol):
    """kubelet's volumes on the node. No link in a volume is followed out of it."""

    def is_part(self, host_path: str, pod_uid: str) -> bool:
        """Whether it is a part (subPath) of a volume of that pod that kubelet writes."""

    def has_pod(self, log_directory: str) -> bool:
        """Whether kubelet still has the pod with this log directory. kubelet makes the directory before the pod's sandbox, and
        removes it when the pod is gone: not between two sandboxes, and not at a reboot."""

    def read(self, volume: CopiedVolume) -> tuple[Entry, ...]:
        """All entries of the volume, from one moment. Raises NotFound, InvalidRequest (too large, or it has a socket,
        FIFO or device), Unavailable (it keeps changing), InternalError."""

    def empty_tmpfs(self, host_path: str) -> Tmpfs:
        """The mount options of an empty emptyDir with medium Memory. Raises NotFound, InvalidRequest (another medium),
        WrongState (not empty), InternalError."""

    def changed(self, hosts: Collection[str], timeout: float) -> Collection[str]:
        """Waits up to `timeout` seconds for changes in these directories, and returns those that changed. A directory
        that was not in the previous call counts as changed. Used by one thread."""


# The share program, which runs a virtiofsd for each VM with volumes, and a passt for each VM with containers beside it.


@dataclass(frozen=True, slots=True)
class VmNetwork:
    """What passt needs: the pod's network as tapmanager found it, and the guest's ports."""

    pod: PodNetwork
    ports: GuestPorts


class VmShares(Protocol):
    """Errors: Unavailable (the program does not answer, or virtiofsd is not installed), InvalidRequest, NotFound (a
    volume, with its path), DeadlineExceeded (a volume does not answer), WrongState (a virtiofsd does not end),
    InternalError."""

    def check(self, volumes: Sequence[SharedVolume], timeout: float) -> None:
        """Raises an error if a volume does not exist or cannot be shared."""

    def check_passt(self, timeout: float) -> None:
        """Raises Unavailable if passt is not installed."""

    def start(self, container: Container, cgroup_parent: str, timeout: float, network: VmNetwork | None = None) -> None:
        """From now on the container's VM, and no other, can reach its volumes. `cgroup_parent`: the pod's cgroup, as
        RunPodSandbox gave it. `network`: for which passt starts; raises WrongState if another container of the pod holds
        a port, or the namespace is gone. An error leaves nothing behind."""

    def end(self, name: str, timeout: float) -> None:
        """Releases the volumes. `name`: the container's short id. No error if there is nothing to release."""

    def served(self, timeout: float) -> Mapping[str, bool]:
        """Short id of each container that the program knows -> whether its volumes are served."""

    def connected(self, timeout: float) -> Mapping[str, bool]:
        """Short id of each container with a passt -> whether it runs."""

    def passt_socket(self, container: ContainerId) -> str:
        """The path of the socket of the container's passt."""


class VolumeDiskFiles(Protocol):
    """Volumes that are disks. No link in a volume is followed."""

    def flex_options(self, directory: str) -> bytes:
        """What the flexVolume driver has written into the volume's directory. Raises NotFound, InvalidRequest (not a
        regular file, or too large), InternalError."""

    def image(self, directory: str, *, readonly: bool) -> str:
        """The identity of the disk image in a volume, which is the same for all its paths on the node. Raises NotFound,
        InvalidRequest (not a regular file, empty, or not writable), InternalError."""
