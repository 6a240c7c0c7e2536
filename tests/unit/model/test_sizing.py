"""A container's resources decide the size of the VM and of its cgroup, and what a resize may change."""

import dataclasses
from typing import Any

import pytest

from virtshim.annotations.options import VmOptions
from virtshim.model.container import Resources
from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.model.hardware import HardwareOptions, Topology
from virtshim.model.ids import SandboxId
from virtshim.model.sandbox import PodKey, Sandbox, SandboxConfig
from virtshim.model.sizing import (
    NodeLimits,
    faults,
    limits_for,
    merged,
    nic_queues,
    overhead_missing,
    resized,
    size_for,
)
from virtshim.model.vm import VmSize

MIB = 1 << 20
GIB = 1 << 30
NODE = NodeLimits(default_memory=GIB, min_memory=32 * MIB, max_vcpus=8)
ROOMY = dataclasses.replace(NODE, room_vcpus=4, room_memory=8 * GIB)


def wrong(**fields: Any) -> list[str]:
    return list(faults(Resources(**fields), "linux", cpus=4, mems=1))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cpu_shares": -1}, "linux.cpu_shares is negative"),
        ({"memory_limit_bytes": -1}, "linux.memory_limit_in_bytes is negative"),
        ({"cpu_quota": -2}, "linux.cpu_quota -2"),
        ({"cpu_quota": 999}, "linux.cpu_quota 999"),
        ({"cpu_period": 999}, "linux.cpu_period 999"),
        ({"cpu_period": 1_000_001}, "linux.cpu_period 1000001"),
        ({"oom_score_adj": 1001}, "linux.oom_score_adj 1001"),
        ({"memory_limit_bytes": 2, "memory_swap_limit_bytes": 1}, "linux.memory_swap_limit_in_bytes 1"),
        ({"cpuset_cpus": "0,"}, "linux.cpuset_cpus '0,'"),
        ({"cpuset_cpus": "3-1"}, "linux.cpuset_cpus: 3-1 counts backwards"),
        ({"cpuset_cpus": "0-4"}, "linux.cpuset_cpus: there is no CPU 4"),
        ({"cpuset_mems": "1"}, "linux.cpuset_mems: there is no memory node 1"),
        ({"hugepage_limits": {"2M": 0}}, "linux.hugepage_limits: '2M'"),
        ({"hugepage_limits": {"2MB": 3}}, "linux.hugepage_limits[2MB] 3"),
        ({"hugepage_limits": {"2MB": 2 * MIB, "1GB": GIB}}, "linux.hugepage_limits: a virtual machine's memory"),
        ({"unified": {"memory.max": "1"}}, "linux.unified[memory.max]"),
        ({"unified": {"../x": "1"}}, "linux.unified[../x]"),
        ({"unified": {"memory.high": "1M"}}, "linux.unified[memory.high]"),
        ({"unified": {"memory.oom.group": "2"}}, "linux.unified[memory.oom.group]"),
    ],
)
def test_a_bad_value_is_reported_with_its_field(fields: dict[str, Any], says: str) -> None:
    (fault,) = wrong(**fields)
    assert fault.startswith(says)


def test_kubelets_values_for_an_ordinary_pod_are_accepted() -> None:
    pages = {"2MB": 0, "1GB": 0}
    assert wrong(cpu_shares=2, cpu_period=100_000, oom_score_adj=-998, hugepage_limits=pages, cpuset_cpus="0-1,3") == []
    assert wrong(cpu_quota=-1, unified={"memory.swap.max": "0", "memory.high": "max", "memory.oom.group": "1"}) == []


def test_a_vm_can_grow_as_far_as_its_pod_or_its_node_says() -> None:
    asked = Resources(cpu_quota=150_000, memory_limit_bytes=GIB)
    assert size_for(VmOptions(), asked, NODE) == VmSize(2, 2, GIB, GIB)
    assert size_for(VmOptions(), asked, ROOMY) == VmSize(2, 4, GIB, 8 * GIB)
    pod = VmOptions(max_vcpus=3, max_memory_bytes=2 * GIB)
    assert size_for(pod, asked, ROOMY) == VmSize(2, 3, GIB, 2 * GIB)
    assert size_for(VmOptions(max_vcpus=1, max_memory_bytes=1), asked, NODE) == VmSize(2, 2, GIB, GIB)


def test_a_vm_with_a_topology_can_grow_only_as_its_pod_says() -> None:
    two = HardwareOptions(topology=Topology(1, 2, 1))
    limit = Resources(cpu_quota=200_000, cpu_period=100_000)
    assert size_for(VmOptions(hardware=two), limit, ROOMY).max_vcpus == 2
    assert size_for(VmOptions(hardware=two, max_vcpus=3), limit, ROOMY).max_vcpus == 3


def test_a_fixed_number_of_vcpus_cannot_grow() -> None:
    assert size_for(VmOptions(vcpus=2), Resources(), ROOMY).max_vcpus == 2


@pytest.mark.parametrize(
    ("asked", "vcpus", "most", "queues"),
    [
        (0, 1, 1, 1),
        (0, 2, 2, 2),
        (0, 8, 8, 8),
        (0, 64, 64, 8),
        (0, 2, 16, 2),
        (4, 2, 16, 4),
        (1, 8, 8, 1),
        (4, 1, 1, 4),
    ],
)
def test_a_nic_has_a_queue_for_each_vcpu_at_the_start_or_what_is_asked_for(
    asked: int, vcpus: int, most: int, queues: int
) -> None:
    assert nic_queues(VmOptions(nic_queues=asked), VmSize(vcpus, most, 1 << 30, 1 << 30)) == queues


def test_room_for_more_vcpus_than_the_node_allows_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"virtshim\.io/max-vcpus"):
        size_for(VmOptions(max_vcpus=9), Resources(), NODE)


def test_huge_pages_are_the_guests_memory_and_cannot_grow() -> None:
    asked = Resources(memory_limit_bytes=64 * MIB, hugepage_limits={"2MB": GIB, "1GB": 0})
    size = size_for(VmOptions(), asked, ROOMY)
    assert (size.memory_bytes, size.max_memory_bytes, size.page_bytes) == (GIB, GIB, 2 * MIB)
    limits = limits_for(asked, Resources(), size, NODE)
    assert limits.hugepages == {2 * MIB: GIB}
    assert limits.memory < GIB
    with pytest.raises(InvalidRequest, match=r"virtshim\.io/max-memory"):
        size_for(VmOptions(max_memory_bytes=2 * GIB), asked, NODE)


def test_the_cgroup_has_the_guests_memory_and_the_pods_overhead_on_top() -> None:
    asked = Resources(memory_limit_bytes=GIB)
    size = size_for(VmOptions(), asked, NODE)
    overhead = Resources(memory_limit_bytes=300 * MIB)
    assert limits_for(asked, overhead, size, NODE).memory == GIB + 300 * MIB  # as kubelet limits the pod
    assert limits_for(asked, Resources(), size, NODE).memory == GIB + NODE.overhead


def test_a_large_guest_of_a_pod_without_overhead_has_room_for_its_page_tables() -> None:
    asked = Resources(memory_limit_bytes=64 * GIB)
    assert limits_for(asked, Resources(), size_for(VmOptions(), asked, NODE), NODE).memory == 64 * GIB + 640 * MIB


def test_an_overhead_too_small_for_qemu_does_not_count() -> None:
    asked = Resources(memory_limit_bytes=GIB)
    size = size_for(VmOptions(), asked, NODE)
    assert limits_for(asked, Resources(memory_limit_bytes=1), size, NODE).memory >= GIB + 128 * MIB


def test_a_container_without_a_limit_is_bounded_by_its_guests_size() -> None:
    limits = limits_for(Resources(), Resources(), size_for(VmOptions(), Resources(), NODE), NODE)
    assert limits.memory > NODE.default_memory
    assert limits.cpu_quota == 0


def test_the_overheads_cpu_is_on_top_of_the_quota_in_the_containers_period() -> None:
    asked = Resources(cpu_quota=50_000, cpu_period=50_000, memory_limit_bytes=GIB)
    size = size_for(VmOptions(), asked, NODE)
    limits = limits_for(asked, Resources(cpu_quota=10_000, cpu_period=100_000), size, NODE)
    assert (limits.cpu_quota, limits.cpu_period) == (55_000, 50_000)


def test_swap_is_the_memory_swap_total_minus_memory() -> None:
    asked = Resources(memory_limit_bytes=GIB, memory_swap_limit_bytes=GIB + 5 * MIB)
    size = size_for(VmOptions(), asked, NODE)
    assert limits_for(asked, Resources(), size, NODE).swap == 5 * MIB
    assert limits_for(dataclasses.replace(asked, memory_swap_limit_bytes=0), Resources(), size, NODE).swap is None


def test_memory_high_acts_at_the_limit_and_protection_covers_qemu() -> None:
    asked = Resources(memory_limit_bytes=GIB, unified={"memory.high": "5", "memory.min": str(MIB), "memory.low": "0"})
    size = size_for(VmOptions(), asked, NODE)
    limits = limits_for(asked, Resources(), size, NODE)
    assert limits.unified["memory.high"] == str(limits.memory)
    assert int(limits.unified["memory.min"]) > NODE.overhead
    assert limits.unified["memory.low"] == "0"


def test_zero_and_empty_leave_a_value_unchanged() -> None:
    old = Resources(2, 3, 4, 5, 6, 7, "0", "0", {"2MB": 0}, {"memory.high": "1"})
    assert merged(old, Resources()) == old
    assert merged(old, Resources(cpuset_cpus="1")) == dataclasses.replace(old, cpuset_cpus="1")
    assert merged(old, Resources(cpu_quota=-1)).cpu_quota == -1
    both = merged(old, Resources(unified={"memory.swap.max": "0"}))
    assert both.unified == {"memory.high": "1", "memory.swap.max": "0"}


def test_a_resize_within_the_limits_is_accepted_and_vcpus_are_never_removed() -> None:
    size = VmSize(2, 4, GIB, 2 * GIB)
    more = Resources(cpu_quota=350_000, memory_limit_bytes=2 * GIB)
    assert resized(size, VmOptions(), more, NODE) == VmSize(4, 4, 2 * GIB, 2 * GIB)
    less = Resources(cpu_quota=50_000, memory_limit_bytes=512 * MIB)
    assert resized(size, VmOptions(), less, NODE) == VmSize(2, 4, 512 * MIB, 2 * GIB)
    assert resized(size, VmOptions(), Resources(), NODE) == size


@pytest.mark.parametrize(
    ("resources", "remedy"),
    [
        (Resources(cpu_quota=500_000), "virtshim.io/max-vcpus"),
        (Resources(memory_limit_bytes=3 * GIB), "virtshim.io/max-memory"),
        (Resources(hugepage_limits={"2MB": GIB}), "restart the pod"),
    ],
)
def test_the_error_for_a_resize_beyond_the_limits_says_what_to_change(resources: Resources, remedy: str) -> None:
    with pytest.raises(WrongState, match=remedy):
        resized(VmSize(2, 4, GIB, 2 * GIB), VmOptions(), resources, NODE)


def test_a_resize_below_what_a_guest_needs_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"vm\.min_memory"):
        resized(VmSize(2, 4, GIB, 2 * GIB), VmOptions(), Resources(memory_limit_bytes=MIB), NODE)


@pytest.mark.parametrize(("limit", "overhead", "missing"), [(100, 64, 0), (64, 64, 0), (32, 64, 32)])
def test_the_memory_limit_of_a_guest_in_huge_pages_is_for_qemu_alone_whatever_the_guests_size(
    limit: int, overhead: int, missing: int
) -> None:
    asked = Resources(memory_limit_bytes=limit * MIB, hugepage_limits={"2MB": 64 * GIB})
    config = SandboxConfig(cgroup_parent="/kubepods/pod1", overhead=Resources(memory_limit_bytes=overhead * MIB))
    pod = Sandbox(SandboxId("a" * 64), PodKey("default", "web", "uid", 0), config, 1)
    assert overhead_missing(pod, asked, size_for(VmOptions(), asked, NODE)) == missing * MIB


SMALL = dataclasses.replace(NODE, memory=4 * GIB)


@pytest.mark.parametrize(
    ("resources", "options", "field"),
    [
        (Resources(memory_limit_bytes=4 * GIB + 1), VmOptions(), "resources.limits.memory"),
        (Resources(), VmOptions(max_memory_bytes=5 * GIB), "annotation virtshim.io/max-memory"),
    ],
)
def test_more_memory_than_the_node_has_is_refused(resources: Resources, options: VmOptions, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} is .* this node has {4 * GIB} bytes"):
        size_for(options, resources, SMALL)
    assert size_for(VmOptions(), Resources(memory_limit_bytes=4 * GIB), SMALL).memory_bytes == 4 * GIB


def test_room_to_grow_ends_at_the_nodes_memory() -> None:
    node = dataclasses.replace(SMALL, room_memory=8 * GIB)
    assert size_for(VmOptions(), Resources(), node).max_memory_bytes == 4 * GIB
