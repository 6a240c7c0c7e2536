"""libvirt's own cgroups, NUMA nodes and huge pages keep the limits, with the real kernel."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hugepages import PAGES, number, reserved

LIMITS = """
from virtshim.model.cgroup import CgroupLimits

def there(controller, name):
    line = next(l for l in Path(f"/proc/{qemu_pid()}/cgroup").read_text().splitlines() if controller in l.split(":")[1])
    group = line.split(":", 2)[2].removesuffix("/emulator")
    return Path(f"/sys/fs/cgroup/{controller}{group}/{name}").read_text().strip()

def all_there():
    numbers = [there("cpu", "cpu.cfs_quota_us"), there("cpu", "cpu.shares"), there("memory", "memory.limit_in_bytes")]
    return [*map(int, numbers), there("cpuset", "emulator/cpuset.cpus")]
"""
UNLIMITED = (1 << 63) - 4096


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """64 MiB of huge pages, and their file system where libvirt looks for it."""
    with reserved(32):
        Path("/dev/hugepages").mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "hugetlbfs", "none", "/dev/hugepages"], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "/dev/hugepages"], check=True)


@pytest.mark.skipif(not Path("/sys/fs/cgroup/cpu").exists(), reason="NOT TO BE HAD HERE: reads cgroup v1 files")
def test_libvirts_own_cgroup_gets_its_limits_at_the_start_and_later(place):
    """As below systemd's slices, but without systemd. There is no memory limit at the start: libvirt would raise
    RLIMIT_MEMLOCK with it, which takes CAP_SYS_RESOURCE."""
    said = place.run(
        LIMITS
        + """
boot(dataclasses.replace(SPEC, size=dataclasses.replace(SPEC.size, max_vcpus=2), limits=CgroupLimits(512, 50_000, 100_000, "0")))
say(all_there())
resizing.set_limits(SPEC.uuid, CgroupLimits(1024, 80_000, 100_000, "", "", 400 << 20))
say(all_there())
resizing.set_limits(SPEC.uuid, CgroupLimits())
say(all_there())
resizing.add_vcpus(SPEC.uuid, 2)
hypervisor.destroy(SPEC.uuid, SPEC.container_id)
""",
        "libvirt-cgroups",
    )
    assert said == [[50_000, 512, UNLIMITED, "0"], [80_000, 1024, 400 << 20, "0"], [-1, 1024, UNLIMITED, "0"]]


TWO_NODES = """
from virtshim.model.cgroup import CgroupLimits
from virtshim.model.vm import NumaCell, VmSize
from virtshim.vm.elements import processors

def boot_on_two(**changes):
    size = VmSize(vcpus=2, max_vcpus=4, memory_bytes=32 << 20, max_memory_bytes=64 << 20)
    cells = tuple(NumaCell(0, frozenset({cpu}), (cpu, cpu + 2), 32 << 20) for cpu in range(2))
    boot(dataclasses.replace(SPEC, **{"size": size, "cells": cells, **changes}))

def runs_on():
    found = {}
    for task in Path(f"/proc/{qemu_pid()}/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("CPU "):
            found[name.split("/")[0]] = processors.listed(os.sched_getaffinity(int(task.name)))
    return dict(sorted(found.items()))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="NOT TO BE HAD HERE: one CPU")
def test_each_numa_node_runs_on_its_own_cpus_including_hotplugged_vcpus(place):
    """Both guest nodes are on this machine's only NUMA node."""
    said = place.run(
        TWO_NODES
        + """
boot_on_two(limits=CgroupLimits(cpuset_mems="0"))
say(runs_on())
resizing.add_vcpus(SPEC.uuid, 4)
resizing.set_memory(SPEC.uuid, 64 << 20, 30, threading.Event())
say(runs_on())
words = Path(f"/proc/{qemu_pid()}/cmdline").read_text().split(chr(0))
say([word for word in words if '"policy"' in word])
hypervisor.destroy(SPEC.uuid, SPEC.container_id)
"""
    )
    alone = {f"CPU {vcpu}": str(vcpu % 2) for vcpu in range(4)}
    assert said[:2] == [{name: alone[name] for name in ("CPU 0", "CPU 1")}, alone]
    assert len(said[2]) == 2
    assert all('"preferred"' in word and '"host-nodes":[0]' in word for word in said[2])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="NOT TO BE HAD HERE: one CPU")
@pytest.mark.skipif(not Path("/sys/fs/cgroup/cpu").exists(), reason="NOT TO BE HAD HERE: cgroup v1")
def test_a_repeated_cpuset_leaves_numa_nodes_in_place_and_a_new_one_moves_them(place):
    """kubelet repeats the cpuset after its restart; this is the case below systemd's slices."""
    said = place.run(
        TWO_NODES
        + """
boot_on_two(limits=CgroupLimits(cpuset_cpus="0-1", cpuset_mems="0"), size=VmSize(vcpus=4, memory_bytes=64 << 20))
for cpus in ("0-1", "1"):
    resizing.set_limits(SPEC.uuid, CgroupLimits(cpuset_cpus=cpus))
    say(list(runs_on().values()))
hypervisor.destroy(SPEC.uuid, SPEC.container_id)
""",
        "libvirt-cgroups",
    )
    assert said == [["0", "1", "0", "1"], ["1", "1", "1", "1"]]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="NOT TO BE HAD HERE: one CPU")
def test_a_new_cpuset_moves_numa_nodes_where_libvirt_does_not_own_the_cgroup(place):
    """Threads that were bound to some CPUs of a group do not move by themselves when the group gets others."""
    said = place.run(
        TWO_NODES
        + """
boot_on_two()
for cpus in ("0-1", "1"):
    resizing.set_limits(SPEC.uuid, CgroupLimits(cpuset_cpus=cpus))
    say(list(runs_on().values()))
resizing.add_vcpus(SPEC.uuid, 4)
say(list(runs_on().values()))
hypervisor.destroy(SPEC.uuid, SPEC.container_id)
"""
    )
    assert said == [["0", "1"], ["1", "1"], ["1", "1", "1", "1"]]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="NOT TO BE HAD HERE: one CPU")
def test_a_guest_without_numa_nodes_is_bound_only_by_its_cgroup(place):
    said = place.run(
        TWO_NODES
        + """
boot()
resizing.set_limits(SPEC.uuid, CgroupLimits(cpuset_cpus="1"))
say(list(runs_on().values()))
with connection.using("look") as conn:
    say("vcpupin" in conn.lookupByUUID(SPEC.uuid.bytes).XMLDesc())
hypervisor.destroy(SPEC.uuid, SPEC.container_id)
"""
    )
    assert said[0] != ["1"]
    assert said[1] is False


@pytest.mark.usefixtures("huge_pages")
def test_each_numa_node_has_shared_huge_pages(place):
    free = number("free_hugepages")
    said = place.run(
        TWO_NODES
        + """
boot_on_two(size=VmSize(vcpus=2, max_vcpus=4, memory_bytes=64 << 20, page_bytes=2 << 20))
"""
        + f"say(int(Path('{PAGES}/free_hugepages').read_text()))"
        "; hypervisor.destroy(SPEC.uuid, SPEC.container_id)"
    )
    assert said == [free - 32]


@pytest.mark.usefixtures("huge_pages")
def test_guest_memory_uses_huge_pages(place):
    free = number("free_hugepages")
    said = place.run(
        "boot(dataclasses.replace(SPEC, size=dataclasses.replace(SPEC.size, page_bytes=2 << 20))); "
        f"say(int(Path('{PAGES}/free_hugepages').read_text()))"
        "; hypervisor.destroy(SPEC.uuid, SPEC.container_id)"
    )
    assert said == [free - 16]
