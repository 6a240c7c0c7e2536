"""The resource requests that kubelet 1.36 sends for a pod with one container, and the values that it writes to the pod's
own cgroup.

The rules are those of its `kuberuntime_container_linux.go`, `kuberuntime_sandbox_linux.go`, `kuberuntime_manager.go`
(doPodResizeAction) and `cm/helpers_linux.go`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from criproto.runtime_v1 import api_pb2 as pb

_PERIOD = 100_000
# All page sizes of the node, whether the pod has some or not.
_PAGE_SIZES = ("1GB", "2MB")
_CAPACITY = 16 << 30
# The values that it reads from a group without a memory limit, in cgroup v1 and v2.
NO_MEMORY_LIMIT_V1 = 0x7FFF_FFFF_FFFF_F000
NO_MEMORY_LIMIT_V2 = -1


class Qos(enum.Enum):
    """The classes, each with its cgroup below kubelet's."""

    GUARANTEED = "/kubepods"
    BURSTABLE = "/kubepods/burstable"
    BEST_EFFORT = "/kubepods/besteffort"


@dataclass(frozen=True, slots=True)
class Asked:
    """A container's requests and limits: thousandths of a CPU, and bytes; 0: not set. `overhead_*`: the RuntimeClass's.
    `exclusive`: by the static CPU manager. `cfs_quota`: kubelet's setting."""

    cpu: int = 0
    cpu_limit: int = 0
    memory: int = 0
    memory_limit: int = 0
    overhead_cpu: int = 0
    overhead_memory: int = 0
    hugepages: Mapping[str, int] = field(default_factory=dict)
    exclusive: str = ""
    cfs_quota: bool = True

    @property
    def qos(self) -> Qos:
        if not (self.cpu or self.cpu_limit or self.memory or self.memory_limit):
            return Qos.BEST_EFFORT
        is_whole = self.cpu_limit and self.memory_limit
        same = (self.cpu or self.cpu_limit, self.memory or self.memory_limit) == (self.cpu_limit, self.memory_limit)
        return Qos.GUARANTEED if is_whole and same else Qos.BURSTABLE


@dataclass(frozen=True, slots=True)
class PodGroup:
    """The values that kubelet writes to the pod's own cgroup; None: nothing."""

    shares: int
    quota: int | None
    memory: int | None


def shares(milli: int) -> int:
    return min(max(milli * 1024 // 1000, 2), 262_144)


def quota(milli: int) -> int:
    return max(milli * _PERIOD // 1000, 1000) if milli else 0


def _linux(cpu: int | None, cpu_limit: int, memory_limit: int, asked: Asked) -> pb.LinuxContainerResources:
    """Linux resources. `cpu` None: there is no request."""
    made = pb.LinuxContainerResources(
        cpu_shares=shares(cpu_limit if cpu is None else cpu), memory_limit_in_bytes=memory_limit
    )
    if asked.cfs_quota:
        made.cpu_quota = -1 if asked.exclusive else quota(cpu_limit)
        made.cpu_period = _PERIOD
    return made


def sandbox_linux(asked: Asked, cgroup_parent: str = "") -> pb.LinuxPodSandboxConfig:
    """The resources in RunPodSandbox."""
    return pb.LinuxPodSandboxConfig(
        cgroup_parent=cgroup_parent,
        resources=_linux(asked.cpu or None, asked.cpu_limit, asked.memory_limit, asked),
        overhead=_overhead(asked),
    )


def _overhead(asked: Asked) -> pb.LinuxContainerResources:
    if not (asked.overhead_cpu or asked.overhead_memory):
        return pb.LinuxContainerResources()
    shared = dataclasses.replace(asked, exclusive="")
    return _linux(asked.overhead_cpu, asked.overhead_cpu, asked.overhead_memory, shared)


def container_linux(asked: Asked) -> pb.LinuxContainerResources:
    """The resources in CreateContainer."""
    made = update_linux(asked, has_request=asked.cpu > 0)
    for limit in made.hugepage_limits:
        limit.limit = asked.hugepages.get(limit.page_size, 0)
    made.cpuset_cpus = asked.exclusive
    return made


def update_linux(asked: Asked, *, has_request: bool = True) -> pb.LinuxContainerResources:
    """The resources in UpdateContainerResources, which has CPU and memory only: all huge pages are 0 and there is no
    cpuset."""
    made = _linux(asked.cpu if has_request else None, asked.cpu_limit, asked.memory_limit, asked)
    made.oom_score_adj = {
        Qos.GUARANTEED: -997,
        Qos.BURSTABLE: min(max(1000 - 1000 * asked.memory // _CAPACITY, 3), 999),
        Qos.BEST_EFFORT: 1000,
    }[asked.qos]
    made.hugepage_limits.extend(pb.HugepageLimit(page_size=size) for size in _PAGE_SIZES)
    return made


def cpuset_linux(cpus: str) -> pb.LinuxContainerResources:
    """The resources in UpdateContainerResources from the CPU manager."""
    return pb.LinuxContainerResources(cpuset_cpus=cpus)


def pod_group(asked: Asked) -> PodGroup:
    """The pod's values. The sums include the overhead, which is a limit if there are limits."""
    if asked.qos is Qos.BEST_EFFORT:
        return PodGroup(shares(0), None, None)
    cpu = asked.cpu_limit and asked.cpu_limit + asked.overhead_cpu
    memory = asked.memory_limit and asked.memory_limit + asked.overhead_memory
    most = -1 if asked.exclusive or not asked.cfs_quota else quota(cpu)
    return PodGroup(shares((asked.cpu or asked.cpu_limit) + asked.overhead_cpu), most if cpu else None, memory or None)


def resize_steps(
    before: Asked, after: Asked, no_memory_limit: int = NO_MEMORY_LIMIT_V2
) -> list[pb.UpdatePodSandboxResourcesRequest | pb.UpdateContainerResourcesRequest]:
    """The steps of an in-place resize, in order and without ids: memory, then CPU. If limits grow the pod comes first,
    if they shrink its container. kubelet reads the pod's current values from its cgroup, so "no limit" arrives as -1,
    or as a very large number, minus the overhead."""
    steps: list[pb.UpdatePodSandboxResourcesRequest | pb.UpdateContainerResourcesRequest] = []
    was, to = pod_group(before), pod_group(after)
    memory = no_memory_limit if was.memory is None else was.memory
    now = {"memory": memory, "quota": -1 if was.quota is None else was.quota, "shares": was.shares}

    def tell(what: str, value: int | None) -> None:
        if value is not None:
            now[what] = value
        steps.append(_pod_update(after, now))

    def resize_container(asked: Asked) -> None:
        steps.append(pb.UpdateContainerResourcesRequest(linux=update_linux(asked)))

    middle = dataclasses.replace(before, memory=after.memory, memory_limit=after.memory_limit)
    for done, changes in ((middle, (("memory", to.memory),)), (after, (("quota", to.quota), ("shares", to.shares)))):
        grows = [(what, value) for what, value in changes if value is not None and value > now[what]]
        shrinks = [(what, value) for what, value in changes if value is not None and value < now[what]]
        for what, value in grows:
            tell(what, value)
        resize_container(done)
        for what, value in reversed(shrinks):
            tell(what, value)
    return steps


def _pod_update(asked: Asked, now: Mapping[str, int]) -> pb.UpdatePodSandboxResourcesRequest:
    milli = now["shares"] * 1000 // 1024
    overhead_quota = quota(asked.overhead_cpu)
    return pb.UpdatePodSandboxResourcesRequest(
        overhead=_overhead(asked),
        resources=pb.LinuxContainerResources(
            cpu_shares=shares(milli - asked.overhead_cpu) if asked.overhead_cpu else now["shares"],
            cpu_quota=now["quota"] - overhead_quota,
            cpu_period=_PERIOD,
            memory_limit_in_bytes=now["memory"] - asked.overhead_memory,
        ),
    )
