"""libvirt's statistics become values. The names and numbers are those of libvirt 9.0 with a Linux guest."""

from __future__ import annotations

import pytest

from virtshim.model.usage import BlockUsage, GuestMemory, VcpuUsage, VmCounters
from virtshim.vm.statistics import to_counters

STATS: dict[str, object] = {
    "state.state": 1,
    "cpu.time": 290_000_000,
    "cpu.user": 120_000_000,
    "cpu.system": 170_000_000,
    "balloon.current": 131_072,
    "balloon.maximum": 262_144,
    "balloon.swap_in": 1,
    "balloon.swap_out": 2,
    "balloon.major_fault": 115,
    "balloon.minor_fault": 4100,
    "balloon.unused": 60_000,
    "balloon.available": 100_000,
    "balloon.usable": 70_000,
    "balloon.disk_caches": 9000,
    "balloon.last-update": 1_800_000_000,
    "balloon.rss": 45_596,
    "vcpu.current": 2,
    "vcpu.maximum": 3,
    "vcpu.0.state": 1,
    "vcpu.0.time": 50_000_000,
    "vcpu.0.wait": 0,
    "vcpu.0.delay": 67_577_149,
    "vcpu.2.time": 7,
    "net.count": 0,
    "block.count": 2,
    "block.0.name": "vda",
    "block.0.path": "/disk.raw",
    "block.0.rd.reqs": 1,
    "block.0.rd.bytes": 512,
    "block.0.rd.times": 102_513,
    "block.0.wr.reqs": 2,
    "block.0.wr.bytes": 1024,
    "block.0.wr.times": 3,
    "block.0.fl.reqs": 4,
    "block.0.fl.times": 5,
    "block.1.name": "sda",
}


def test_each_number_is_converted_to_bytes_or_nanoseconds() -> None:
    assert to_counters(STATS, 42) == VmCounters(
        taken_at=42,
        cpu=290_000_000,
        cpu_user=120_000_000,
        cpu_system=170_000_000,
        vcpus=(VcpuUsage(0, 50_000_000, 0, 67_577_149), VcpuUsage(2, 7)),
        memory=GuestMemory(
            maximum=262_144 << 10,
            current=131_072 << 10,
            available=100_000 << 10,
            unused=60_000 << 10,
            usable=70_000 << 10,
            disk_caches=9000 << 10,
            swap_in=1 << 10,
            swap_out=2 << 10,
            major_faults=115,
            minor_faults=4100,
        ),
        blocks=(BlockUsage("vda", 1, 512, 102_513, 2, 1024, 3, 4, 5),),
    )


def test_a_vm_without_statistics_has_no_numbers_rather_than_zeros() -> None:
    assert to_counters({"state.state": 1}, 42) == VmCounters(42)


@pytest.mark.parametrize("update", [{"balloon.last-update": 0}, {"balloon.last-update": None}])
def test_before_the_guests_driver_reports_only_the_hosts_numbers_count(update: dict[str, object]) -> None:
    memory = to_counters(STATS | update, 42).memory
    assert memory == GuestMemory(262_144 << 10, 131_072 << 10)


def test_an_impossible_number_counts_as_unknown() -> None:
    assert to_counters(STATS | {"cpu.time": -1, "cpu.user": "x"}, 42).cpu is None
