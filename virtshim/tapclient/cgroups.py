"""Cgroups of VMs by way of tapmanager: implements `virtshim.ports.VmCgroups`."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from virtshim.domain.cgroup import DEFAULT_PARENT, CgroupLimits, VmCgroup, parent_path, vm_cgroup_path
from virtshim.domain.ids import ContainerId
from virtshim.tapclient import cgroup_accounts
from virtshim.tapclient.networks import PodNetworkClient

log = structlog.get_logger(__name__)


class VmCgroupClient:
    """`own`: tapmanager makes the groups; False where libvirt does, as systemd's scopes: then it is only told what
    oom_score_adj the VM starts with."""

    def __init__(self, client: PodNetworkClient, *, own: bool) -> None:
        self._client = client
        self._own = own

    def make(self, group: VmCgroup, timeout: float) -> None:
        """See the port."""
        args = {"sandbox": group.sandbox.value, **self._args(group)}
        self._client.ask("group", args, timeout, f"making the cgroup of container {group.container.short}")

    def limit(self, group: VmCgroup, timeout: float) -> None:
        """See the port."""
        doing = f"changing the cgroup of container {group.container.short}"
        self._client.ask("limit", self._args(group), timeout, doing)

    def remove(self, container: ContainerId, cgroup_parent: str, timeout: float) -> None:
        """See the port."""
        args = {"container": container.value, "parent": self._parent(cgroup_parent)}
        self._client.ask("ungroup", args, timeout, f"removing the cgroup of container {container.short}")

    def oom_kills(self, container: ContainerId, cgroup_parent: str) -> int:
        """See the port. A systemd scope goes with its QEMU, and its counts with it."""
        if not self._own:
            return 0
        try:
            return cgroup_accounts.oom_kills(vm_cgroup_path(cgroup_parent, container))
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
