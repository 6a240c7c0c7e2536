"""Cgroups of VMs in memory."""

from __future__ import annotations

import dataclasses

from virtshim.model.cgroup import CgroupLimits, VmCgroup, vm_cgroup_path
from virtshim.model.errors import InvalidRequest, NotFound, Unavailable, WrongState
from virtshim.model.ids import ContainerId, SandboxId


class FakeVmCgroups:
    """Implements `virtshim.pods.ports.VmCgroups`. `cgroups` is what exists, by path; `refuses` makes the kernel refuse limits.
    `running`: containers whose VMs are in their groups. `gone`: tapmanager is not there."""

    def __init__(self) -> None:
        self.cgroups: dict[str, VmCgroup] = {}
        self.refuses = ""
        self.gone = False
        self.running: set[ContainerId] = set()
        self.killed: set[ContainerId] = set()
        # Sandboxes whose network the next VM may get.
        self.armed: set[SandboxId] = set()

    def make(self, group: VmCgroup, timeout: float) -> None:
        self._reach()
        self.half_make(group, timeout)
        self.limit(group, timeout)
        self.armed.add(group.sandbox)

    def half_make(self, group: VmCgroup, timeout: float) -> None:
        """Creates the cgroup without limits."""
        self.cgroups.setdefault(
            vm_cgroup_path(group.cgroup_parent, group.container), dataclasses.replace(group, limits=CgroupLimits())
        )

    def start_failed(self, sandbox: SandboxId, timeout: float) -> None:
        self._reach()
        self.armed.discard(sandbox)

    def limit(self, group: VmCgroup, timeout: float) -> None:
        self._reach()
        path = vm_cgroup_path(group.cgroup_parent, group.container)
        if path not in self.cgroups:
            raise NotFound(f"there is no cgroup {path}")
        if self.refuses:
            raise InvalidRequest(self.refuses)
        self.cgroups[path] = group

    def remove(self, container: ContainerId, cgroup_parent: str, timeout: float) -> None:
        self._reach()
        path = vm_cgroup_path(cgroup_parent, container)
        if path in self.cgroups and container in self.running:
            raise WrongState(f"processes are in it still: {path}")
        self.cgroups.pop(path, None)

    def oom_kills(self, container: ContainerId, cgroup_parent: str) -> int:
        there = vm_cgroup_path(cgroup_parent, container) in self.cgroups
        return int(there and container in self.killed)

    def group(self, container: ContainerId) -> VmCgroup:
        (found,) = [group for group in self.cgroups.values() if group.container == container]
        return found

    def _reach(self) -> None:
        if self.gone:
            raise Unavailable("tapmanager cannot be reached")
