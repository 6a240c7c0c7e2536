"""The cgroups of VMs: asks tapmanager to make and remove them, and reads their OOM counters from the file system.

`VmCgroupClient` implements `virtshim.pods.ports.VmCgroups`.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

import structlog

from virtshim.model.cgroup import DEFAULT_PARENT, CgroupLimits, VmCgroup, parent_path, vm_cgroup_path
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.pods.tapmanager_connection import TapmanagerConnection
from virtshim.system.machine import CGROUPS, has_cgroup_v2

log = structlog.get_logger(__name__)


class VmCgroupClient:
    """`own`: whether tapmanager makes the groups. If it does not, libvirt makes them as systemd scopes, and tapmanager
    only gets the oom_score_adj that the VM starts with."""

    def __init__(self, tapmanager: TapmanagerConnection, *, own: bool) -> None:
        self._tapmanager = tapmanager
        self._own = own

    def make(self, group: VmCgroup, timeout: float) -> None:
        args = {"sandbox": group.sandbox.value, "uid": group.uid, "queues": group.nic_queues, **self._args(group)}
        if group.passt_socket:
            args["stream"] = group.passt_socket
        doing = f"making the cgroup of container {group.container.short}"
        self._tapmanager.tell("group", args, timeout, doing, newer=("queues",))

    def start_failed(self, sandbox: SandboxId, timeout: float) -> None:
        self._tapmanager.tell("disarm", {"sandbox": sandbox.value}, timeout, f"closing the network of {sandbox.short}")

    def limit(self, group: VmCgroup, timeout: float) -> None:
        doing = f"changing the cgroup of container {group.container.short}"
        self._tapmanager.tell("limit", self._args(group), timeout, doing)

    def remove(self, container: ContainerId, cgroup_parent: str, timeout: float) -> None:
        args = {"container": container.value, "parent": self._parent(cgroup_parent)}
        self._tapmanager.tell("ungroup", args, timeout, f"removing the cgroup of container {container.short}")

    def oom_kills(self, container: ContainerId, cgroup_parent: str) -> int:
        """A systemd scope, and its counters, disappear together with its QEMU."""
        if not self._own:
            return 0
        try:
            return oom_kills(vm_cgroup_path(cgroup_parent, container))
        except OSError as exc:
            log.warning("cgroup.unreadable", container=container.short, error=str(exc))
            return 0

    def _parent(self, cgroup_parent: str) -> str:
        return (parent_path(cgroup_parent) or DEFAULT_PARENT) if self._own else ""

    def _args(self, group: VmCgroup) -> Mapping[str, object]:
        return {
            "container": group.container.value,
            "parent": self._parent(group.cgroup_parent),
            "limits": _limits(group.limits),
            "oom_score_adj": group.oom_score_adj,
        }


def _limits(limits: CgroupLimits) -> Mapping[str, object]:
    return {
        "cpu_shares": limits.cpu_shares,
        "cpu_quota": limits.cpu_quota,
        "cpu_period": limits.cpu_period,
        "cpuset_cpus": limits.cpuset_cpus,
        "cpuset_mems": limits.cpuset_mems,
        "memory": limits.memory,
        "swap": limits.swap,
        "hugepages": [{"page_size": size, "limit": limit} for size, limit in limits.hugepages.items()],
        "unified": dict(limits.unified),
    }


def oom_kills(group: str, root: str = CGROUPS) -> int:
    """How many of the group's processes the kernel killed because the pod or the group ran out of memory; 0 if the
    group does not exist. Raises OSError for other failures."""
    where = root + group if has_cgroup_v2(root) else f"{root}/memory{group}"
    counts = _counts(f"{where}/memory.events") or _counts(f"{where}/memory.oom_control")
    return counts.get("oom_kill", 0)


def _counts(path: str) -> dict[str, int]:
    """Reads a file with one `name number` pair a line."""
    words = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2}


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENODEV):  # ENODEV: the group was removed while the file was open
            return ""
        raise
