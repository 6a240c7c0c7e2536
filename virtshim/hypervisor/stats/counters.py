"""libvirt's domain statistics, a flat mapping of names to numbers -> VmCounters. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from virtshim.domain.usage import BlockUsage, GuestMemory, VcpuUsage, VmCounters

Stats = Mapping[str, object]

_KIB = 1024


def to_counters(stats: Stats, taken_at: int) -> VmCounters:
    """What is missing (a driver that has it not, a VM that did not answer) is None or empty."""
    return VmCounters(
        taken_at=taken_at,
        cpu=_number(stats, "cpu.time"),
        cpu_user=_number(stats, "cpu.user"),
        cpu_system=_number(stats, "cpu.system"),
        vcpus=_vcpus(stats),
        memory=_memory(stats),
        blocks=_blocks(stats),
    )


def _number(stats: Stats, name: str) -> int | None:
    value = stats.get(name)
    return value if isinstance(value, int) and value >= 0 else None


def _vcpus(stats: Stats) -> tuple[VcpuUsage, ...]:
    """Hot-unplugged ones leave gaps in the numbers."""
    found = []
    for number in range(_number(stats, "vcpu.maximum") or 0):
        time = _number(stats, f"vcpu.{number}.time")
        if time is not None:
            wait, delay = _number(stats, f"vcpu.{number}.wait"), _number(stats, f"vcpu.{number}.delay")
            found.append(VcpuUsage(number, time, wait, delay))
    return tuple(found)


def _memory(stats: Stats) -> GuestMemory | None:
    """All in KiB there. Until the guest's driver has reported (last-update 0), numbers that only it knows are not taken."""
    current, maximum = _number(stats, "balloon.current"), _number(stats, "balloon.maximum")
    if current is None or maximum is None:
        return None
    if not _number(stats, "balloon.last-update"):
        return GuestMemory(maximum * _KIB, current * _KIB)

    def size(name: str) -> int | None:
        value = _number(stats, f"balloon.{name}")
        return None if value is None else value * _KIB

    return GuestMemory(
        maximum=maximum * _KIB,
        current=current * _KIB,
        available=size("available"),
        unused=size("unused"),
        usable=size("usable"),
        disk_caches=size("disk_caches"),
        swap_in=size("swap_in"),
        swap_out=size("swap_out"),
        major_faults=_number(stats, "balloon.major_fault"),
        minor_faults=_number(stats, "balloon.minor_fault"),
    )


def _blocks(stats: Stats) -> tuple[BlockUsage, ...]:
    """A disk without request counts is one whose VM did not answer: left out, for 0 would be wrong."""
    found = []
    for at in range(_number(stats, "block.count") or 0):
        name = stats.get(f"block.{at}.name")
        if isinstance(name, str) and _number(stats, f"block.{at}.rd.reqs") is not None:
            found.append(_block(stats, at, name))
    return tuple(found)


def _block(stats: Stats, at: int, name: str) -> BlockUsage:
    def count(what: str) -> int:
        return _number(stats, f"block.{at}.{what}") or 0

    return BlockUsage(
        device=name,
        reads=count("rd.reqs"),
        read_bytes=count("rd.bytes"),
        read_time=count("rd.times"),
        writes=count("wr.reqs"),
        write_bytes=count("wr.bytes"),
        write_time=count("wr.times"),
        flushes=count("fl.reqs"),
        flush_time=count("fl.times"),
    )
