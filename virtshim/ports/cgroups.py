"""The VMs' cgroups."""

from __future__ import annotations

from typing import Protocol

from virtshim.domain.cgroup import VmCgroup
from virtshim.domain.ids import ContainerId, SandboxId


class VmCgroups(Protocol):
    """The cgroups of VMs, by way of tapmanager. Errors: Unavailable, InvalidRequest (a limit that the kernel refuses, by
    name), WrongState (less than is in use), InternalError, DeadlineExceeded."""

    def make(self, group: VmCgroup, timeout: float) -> None:
        """The group with its limits; the sandbox's next VM starts in it, and gets its network. One that is there gets these
        limits. After an error it may be there without them: `remove` it."""

    def start_failed(self, sandbox: SandboxId, timeout: float) -> None:
        """The VM that `make` was for does not start: no VM gets the sandbox's network by it. No error if there is no network."""

    def limit(self, group: VmCgroup, timeout: float) -> None:
        """Changes the limits of an existing cgroup; all or nothing. NotFound if it does not exist."""

    def remove(self, container: ContainerId, cgroup_parent: str, timeout: float) -> None:
        """WrongState if a VM is in it."""

    def oom_kills(self, container: ContainerId, cgroup_parent: str) -> int:
        """How often the kernel has killed in it for lack of memory; 0 if that cannot be known (any more)."""
