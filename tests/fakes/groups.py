"""Cgroups of VMs in memory."""

from __future__ import annotations

from virtshim.domain.cgroup import VmGroup, vm_group
from virtshim.domain.errors import InvalidRequest, NotFound
from virtshim.domain.ids import ContainerId


class FakeVmGroups:
    """Implements `virtshim.ports.VmGroups`. `groups` is what exists, by path; `refuses` makes the kernel refuse limits."""

    def __init__(self) -> None:
        self.groups: dict[str, VmGroup] = {}
        self.refuses = ""
        self.killed: set[ContainerId] = set()

    def make(self, group: VmGroup, timeout: float) -> None:
        self._check(group)
        self.groups[vm_group(group.cgroup_parent, group.container)] = group

    def limit(self, group: VmGroup, timeout: float) -> None:
        self._check(group)
        path = vm_group(group.cgroup_parent, group.container)
        if path not in self.groups:
            raise NotFound(f"there is no cgroup {path}")
        self.groups[path] = group

    def remove(self, container: ContainerId, cgroup_parent: str, timeout: float) -> None:
        self.groups.pop(vm_group(cgroup_parent, container), None)

    def oom_kills(self, container: ContainerId, cgroup_parent: str) -> int:
        there = vm_group(cgroup_parent, container) in self.groups
        return int(there and container in self.killed)

    def of(self, container: ContainerId) -> VmGroup:
        (found,) = [group for group in self.groups.values() if group.container == container]
        return found

    def _check(self, group: VmGroup) -> None:
        if self.refuses:
            raise InvalidRequest(self.refuses)
