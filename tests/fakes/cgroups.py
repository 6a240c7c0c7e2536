"""Cgroups of VMs in memory."""

from __future__ import annotations

from virtshim.domain.cgroup import VmCgroup, vm_cgroup_path
from virtshim.domain.errors import InvalidRequest, NotFound
from virtshim.domain.ids import ContainerId


class FakeVmCgroups:
    """Implements `virtshim.ports.VmCgroups`. `cgroups` is what exists, by path; `refuses` makes the kernel refuse limits."""

    def __init__(self) -> None:
        self.cgroups: dict[str, VmCgroup] = {}
        self.refuses = ""
        self.killed: set[ContainerId] = set()

    def make(self, group: VmCgroup, timeout: float) -> None:
        self._check(group)
        self.cgroups[vm_cgroup_path(group.cgroup_parent, group.container)] = group

    def limit(self, group: VmCgroup, timeout: float) -> None:
        self._check(group)
        path = vm_cgroup_path(group.cgroup_parent, group.container)
        if path not in self.cgroups:
            raise NotFound(f"there is no cgroup {path}")
        self.cgroups[path] = group

    def remove(self, container: ContainerId, cgroup_parent: str, timeout: float) -> None:
        self.cgroups.pop(vm_cgroup_path(cgroup_parent, container), None)

    def oom_kills(self, container: ContainerId, cgroup_parent: str) -> int:
        there = vm_cgroup_path(cgroup_parent, container) in self.cgroups
        return int(there and container in self.killed)

    def of(self, container: ContainerId) -> VmCgroup:
        (found,) = [group for group in self.cgroups.values() if group.container == container]
        return found

    def _check(self, group: VmCgroup) -> None:
        if self.refuses:
            raise InvalidRequest(self.refuses)
