"""virtshim reads a VM's usage from cgroups of both versions, in trees of files as kernels show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from virtshim.model.usage import CgroupUsage, HugepageUsage, Pressure
from virtshim.vm.cgroup_usage import CgroupTree, usage_of

QEMU, OTHER = 100, 200
VM = "/kubepods/pod1/vm"
PRESSURE = "some avg10=1.50 avg60=0.20 avg300=0.00 total=1234\nfull avg10=0.50 avg60=0.00 avg300=0.00 total=34\n"


class Kernel:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tree = CgroupTree(str(directory / "cg"), str(directory / "proc"))

    def write(self, path: str, content: object) -> None:
        file = self.directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")

    def group(self, path: str, **files: object) -> None:
        for name, content in files.items():
            self.write(f"cg{path}/{name.replace('__', '.')}", content)

    def process(self, pid: int | str, comm: str, *lines: str) -> None:
        self.write(f"proc/{pid}/comm", comm)
        self.write(f"proc/{pid}/cgroup", "\n".join(lines))

    def usage(self) -> CgroupUsage | None:
        return usage_of(QEMU, self.tree)


@pytest.fixture
def v2(tmp_path: Path) -> Kernel:
    kernel = Kernel(tmp_path)
    kernel.write("cg/cgroup.controllers", "cpu io memory pids")
    kernel.process("self", "virtshim", "0::/system.slice/virtshim.service")
    kernel.process(QEMU, "qemu-system-x86", f"0::{VM}")
    kernel.group(
        VM,
        cgroup__procs=QEMU,
        memory__current=1000,
        memory__max="max",
        memory__stat="anon 600\nfile 300\nkernel 50\nshmem 20\nfile_mapped 80\ninactive_file 200\npgfault 9",
        memory__events="low 0\nhigh 0\nmax 3\noom 1\noom_kill 1",
        memory__peak=1500,
        memory__swap__current=7,
        pids__max=32,
        cpu__stat="usage_usec 5\nnr_periods 10\nnr_throttled 4\nthrottled_usec 6",
        cpu__pressure=PRESSURE,
    )
    kernel.write(f"cg{VM}/hugetlb.2MB.current", 4 << 20)
    return kernel


@pytest.fixture
def v1(tmp_path: Path) -> Kernel:
    kernel = Kernel(tmp_path)
    kernel.process("self", "virtshim", "4:memory:/virtshim", "1:cpu,cpuacct:/virtshim", "0::/")
    kernel.process(QEMU, "qemu-system-x86", f"4:memory:{VM}", f"1:cpu,cpuacct:{VM}/emulator", f"8:pids:{VM}")
    kernel.group(
        f"/memory{VM}",
        cgroup__procs=QEMU,
        memory__usage_in_bytes=1000,
        memory__limit_in_bytes=9223372036854771712,
        memory__stat="cache 1\ntotal_cache 300\ntotal_rss 600\ntotal_shmem 20\ntotal_mapped_file 80\n"
        "total_inactive_file 200\ntotal_swap 7",
        memory__max_usage_in_bytes=1500,
        memory__failcnt=3,
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1",
    )
    kernel.group(f"/memory{VM}", **{"memory__kmem.usage_in_bytes": 50})
    kernel.group(f"/pids{VM}", pids__max=32)
    kernel.group(f"/cpu{VM}", cpu__stat="nr_periods 1\nnr_throttled 1\nthrottled_time 1000")
    kernel.group(f"/cpu{VM}/emulator", cpu__stat="nr_periods 4\nnr_throttled 1\nthrottled_time 2000")
    kernel.group(f"/cpu{VM}/vcpu0", cpu__stat="nr_periods 5\nnr_throttled 2\nthrottled_time 3000")
    return kernel


SAME = {
    "memory": 1000,
    "inactive_file": 200,
    "anon": 600,
    "shmem": 20,
    "file": 300,
    "mapped_file": 80,
    "kernel": 50,
    "swap": 7,
    "peak_memory": 1500,
    "limit_hits": 3,
    "oom_kills": 1,
    "cpu_periods": 10,
    "cpu_throttled_periods": 4,
    "cpu_throttled": 6000,
    "max_tasks": 32,
}


def test_usage_is_read_from_cgroups_of_version_2(v2: Kernel) -> None:
    pressure = Pressure(1_234_000, (1.5, 0.2, 0.0), 34_000, (0.5, 0.0, 0.0))
    assert v2.usage() == CgroupUsage(**SAME, pressure={"cpu": pressure}, hugepages=(HugepageUsage("2MB", 4 << 20),))


def test_usage_is_read_from_cgroups_of_version_1(v1: Kernel) -> None:
    assert v1.usage() == CgroupUsage(**SAME)


def test_the_cgroups_memory_limit_is_read(v2: Kernel) -> None:
    v2.group(VM, memory__max=4096)
    usage = v2.usage()
    assert usage is not None
    assert usage.limit == 4096


def test_memory_is_accounted_above_a_threaded_subtree(v2: Kernel) -> None:
    v2.process(QEMU, "qemu-system-x86", f"0::{VM}/libvirt/emulator")
    v2.group(f"{VM}/libvirt/emulator", cpu__stat="nr_periods 1")
    usage = v2.usage()
    assert usage is not None
    assert usage.memory == 1000


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_cgroup_with_other_processes_is_not_the_vms(version: str, request: pytest.FixtureRequest) -> None:
    kernel: Kernel = request.getfixturevalue(version)
    kernel.process(OTHER, "libvirtd", f"0::{VM}")
    kernel.group(VM if version == "v2" else f"/memory{VM}", cgroup__procs=f"{QEMU}\n{OTHER}")
    assert kernel.usage() is None


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_processes_that_libvirt_runs_beside_qemu_count_for_the_vm(version: str, request: pytest.FixtureRequest) -> None:
    kernel: Kernel = request.getfixturevalue(version)
    kernel.process(OTHER, "virtiofsd", f"0::{VM}")
    kernel.group(VM if version == "v2" else f"/memory{VM}", cgroup__procs=f"{QEMU}\n{OTHER}\n300")
    assert kernel.usage() is not None


def test_our_own_cgroup_and_the_root_are_no_vms(v2: Kernel) -> None:
    for path in ("/", "/system.slice/virtshim.service"):
        v2.process(QEMU, "qemu-system-x86", f"0::{path}")
        v2.group(path, cgroup__procs=QEMU, memory__current=1, memory__stat="anon 1\nfile 1\ninactive_file 0")
        assert v2.usage() is None


def test_a_process_that_is_gone_has_no_usage(v2: Kernel) -> None:
    assert usage_of(4711, v2.tree) is None


def test_a_kernel_without_pressure_accounts_or_hugetlb_leaves_them_out(v2: Kernel) -> None:
    for name in ("cpu.pressure", "hugetlb.2MB.current", "memory.peak", "memory.swap.current"):
        (v2.directory / f"cg{VM}/{name}").unlink()
    usage = v2.usage()
    assert usage is not None
    assert (usage.pressure, usage.hugepages, usage.peak_memory, usage.swap) == ({}, (), None, None)
