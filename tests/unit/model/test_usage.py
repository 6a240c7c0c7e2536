"""Readings become CRI's numbers."""

from __future__ import annotations

import dataclasses

from fakes.readings import MIB, process_usage

from virtshim.model.ids import ContainerId
from virtshim.model.usage import (
    CgroupUsage,
    CpuMeter,
    CpuUsage,
    DomainUsage,
    MemoryUsage,
    VmCounters,
    memory_of,
    total_cpu,
    total_memory,
)

SECOND = 1_000_000_000
A, B = ContainerId("a" * 64), ContainerId("b" * 64)
CGROUP = CgroupUsage(
    memory=200 * MIB, inactive_file=30 * MIB, anon=140 * MIB, shmem=10 * MIB, file=50 * MIB, mapped_file=5 * MIB
)


def sample(seconds: float, cpu: float | None) -> VmCounters:
    return VmCounters(int(seconds * SECOND), None if cpu is None else int(cpu * SECOND))


def test_a_vms_usage_is_that_of_its_own_cgroup() -> None:
    use = memory_of(DomainUsage(process=process_usage(), cgroup=CGROUP), 0)
    assert use == MemoryUsage(
        usage=200 * MIB,
        working_set=170 * MIB,
        rss=150 * MIB,
        page_faults=903,
        major_page_faults=3,
        available=None,
        swap=0,
    )


def test_without_a_cgroup_memory_use_is_the_processs_minus_its_program_text() -> None:
    use = memory_of(DomainUsage(process=process_usage()), 0)
    assert use is not None
    assert (use.usage, use.working_set, use.rss) == (170 * MIB, 150 * MIB, 150 * MIB)


def test_page_cache_that_changed_between_two_reads_gives_no_negative_working_set() -> None:
    use = memory_of(DomainUsage(cgroup=dataclasses.replace(CGROUP, memory=10 * MIB)), 0)
    assert use is not None
    assert use.working_set == 0
    assert use.page_faults is None


def test_available_memory_is_what_the_limit_leaves_and_never_negative() -> None:
    usage = DomainUsage(cgroup=CGROUP)
    assert [use.available for limit in (0, 512 * MIB, 64 * MIB) if (use := memory_of(usage, limit))] == [
        None,
        342 * MIB,
        0,
    ]


def test_the_limit_that_is_enforced_counts() -> None:
    use = memory_of(DomainUsage(cgroup=dataclasses.replace(CGROUP, limit=300 * MIB)), 512 * MIB)
    assert use is not None
    assert use.available == 130 * MIB


def test_unknown_memory_use_is_none() -> None:
    assert memory_of(DomainUsage(), 64 * MIB) is None
    assert total_memory([]) is None


def test_swap_is_the_cgroups_if_the_kernel_accounts_it_else_the_processs() -> None:
    process = dataclasses.replace(process_usage(), swap=7)
    assert [
        use.swap
        for usage in (
            DomainUsage(process=process, cgroup=dataclasses.replace(CGROUP, swap=9)),
            DomainUsage(process=process, cgroup=CGROUP),
            DomainUsage(cgroup=CGROUP),
        )
        if (use := memory_of(usage, 0))
    ] == [9, 7, None]


def test_a_pods_memory_is_known_where_all_parts_are() -> None:
    together = total_memory([MemoryUsage(1, 2, 3, 4, 5, 6, 7), MemoryUsage(10, 20, 30, 40, None, None, 70)])
    assert together == MemoryUsage(11, 22, 33, 44, None, None, 77)


def test_a_pods_cpu_is_as_old_as_its_oldest_sample() -> None:
    assert total_cpu([CpuUsage(20, 5, 1), CpuUsage(10, 6, 2)]) == CpuUsage(10, 11, 3)
    assert total_cpu([CpuUsage(20, 5, 1), CpuUsage(10, 6)]) == CpuUsage(10, 11)
    assert total_cpu([]) is None


def test_the_rate_comes_with_the_second_sample() -> None:
    meter = CpuMeter()
    assert meter.take(A, sample(10, 1)) == CpuUsage(10 * SECOND, SECOND)
    assert meter.take(A, sample(12, 2)) == CpuUsage(12 * SECOND, 2 * SECOND, SECOND // 2)
    assert meter.take(B, sample(12, 2)) == CpuUsage(12 * SECOND, 2 * SECOND)


def test_samples_in_quick_succession_keep_the_rate_of_a_whole_second() -> None:
    meter = CpuMeter()
    meter.take(A, sample(10, 1))
    uses = [meter.take(A, sample(at, cpu)) for at, cpu in ((10.5, 1.5), (11, 1.5), (11.2, 1.7), (12, 1.7))]
    assert [use.nano_cores for use in uses if use] == [None, SECOND // 2, SECOND // 2, SECOND // 5]
    assert [use.taken_at for use in uses if use] == [int(at * SECOND) for at in (10.5, 11, 11.2, 12)]


def test_the_total_never_goes_down() -> None:
    meter = CpuMeter()
    meter.take(A, sample(10, 5))
    use = meter.take(A, sample(12, 4))
    assert use == CpuUsage(12 * SECOND, 5 * SECOND, 0)


def test_a_clock_that_was_set_back_gives_no_new_rate() -> None:
    meter = CpuMeter()
    meter.take(A, sample(100, 5))
    assert meter.take(A, sample(50, 6)) == CpuUsage(50 * SECOND, 6 * SECOND)
    assert meter.take(A, sample(52, 7)) == CpuUsage(52 * SECOND, 7 * SECOND, SECOND // 2)


def test_without_a_new_sample_the_last_one_is_returned_with_its_time() -> None:
    meter = CpuMeter()
    assert meter.take(A, None) is None
    last = meter.take(A, sample(10, 1))
    assert meter.take(A, None) == last
    assert meter.take(A, sample(11, None)) == last


def test_a_forgotten_vm_starts_from_zero() -> None:
    meter = CpuMeter()
    meter.take(A, sample(10, 9))
    meter.take(B, sample(10, 9))
    meter.retain_only([B])
    assert meter.take(A, sample(12, 1)) == CpuUsage(12 * SECOND, SECOND)
    assert meter.take(B, None) is not None
