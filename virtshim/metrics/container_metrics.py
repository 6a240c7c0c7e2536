"""Metrics of containers and pods under cAdvisor's names, for kubelet's /metrics/cadvisor and its dashboards.

A container's process on the node is QEMU, so processes, threads, descriptors and memory are QEMU's. A VM without a cgroup of its
own has no quota and no limit, so the counts of exceeding them are truly 0. Numbers that only a cgroup accounts for (page cache,
kernel memory, pressure) have no sample without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from virtshim.metrics.family import SECOND, Family, Sample, counter, gauge, one
from virtshim.metrics.usage import ContainerUsage, SandboxUsage
from virtshim.model.container import Resources
from virtshim.model.usage import (
    BlockUsage,
    CgroupUsage,
    DiskUsage,
    InterfaceUsage,
    MemoryUsage,
    Pressure,
    ProcessUsage,
    VmCounters,
)

Read = Callable[[ContainerUsage], Iterable[Sample]]

_CONTAINER_AND_BELOW = ("container", "hierarchy")


def cpu(pick: Callable[[VmCounters], int | None]) -> Read:
    """Converts nanoseconds to seconds."""

    def read(use: ContainerUsage) -> Iterable[Sample]:
        value = pick(use.domain.counters) if use.domain.counters else None
        return one(None if value is None else value / SECOND)

    return read


def _cpu_total(use: ContainerUsage) -> Iterable[Sample]:
    return (Sample(use.cpu.total / SECOND, ("total",)),) if use.cpu else ()


def _memory(pick: Callable[[MemoryUsage], int | None]) -> Read:
    return lambda use: one(pick(use.memory) if use.memory else None)


def _cgroup(pick: Callable[[CgroupUsage], float | None]) -> Read:
    return lambda use: one(pick(use.domain.cgroup) if use.domain.cgroup else None)


def _cgroup_count(pick: Callable[[CgroupUsage], float | None]) -> Read:
    """0 for a running VM without a cgroup of its own, because the counted events cannot happen."""

    def read(use: ContainerUsage) -> Iterable[Sample]:
        if use.domain.cgroup is not None:
            return one(pick(use.domain.cgroup))
        return one(0 if use.domain.process is not None else None)

    return read


def _process(pick: Callable[[ProcessUsage], int | None]) -> Read:
    return lambda use: one(pick(use.domain.process) if use.domain.process else None)


def _cgroup_or_process(
    group: Callable[[CgroupUsage], int | None], process: Callable[[ProcessUsage], int | None]
) -> Read:
    def read(use: ContainerUsage) -> Iterable[Sample]:
        known = group(use.domain.cgroup) if use.domain.cgroup else None
        return one(known) if known is not None else _process(process)(use)

    return read


def _faults(use: ContainerUsage) -> Iterable[Sample]:
    memory = use.memory
    if memory is None:
        return
    for kind, count in (("pgfault", memory.page_faults), ("pgmajfault", memory.major_page_faults)):
        for scope in _CONTAINER_AND_BELOW:
            if count is not None:
                yield Sample(count, (kind, scope))


def _disk(pick: Callable[[DiskUsage], int]) -> Read:
    return lambda use: (Sample(pick(use.disk), (use.disk.directory,)),) if use.disk else ()


def blocks(pick: Callable[[BlockUsage], float]) -> Read:
    def read(use: ContainerUsage) -> Iterable[Sample]:
        counters = use.domain.counters
        return [Sample(pick(block), (block.device,)) for block in (counters.blocks if counters else ())]

    return read


def _block_operations(use: ContainerUsage) -> Iterable[Sample]:
    for block in use.domain.counters.blocks if use.domain.counters else ():
        yield Sample(block.read_bytes, (block.device, "Read"))
        yield Sample(block.write_bytes, (block.device, "Write"))


def _pressure(what: str, pick: Callable[[Pressure], int]) -> Read:
    def read(cgroup: CgroupUsage) -> float | None:
        pressure = cgroup.pressure.get(what)
        return None if pressure is None else pick(pressure) / SECOND

    return _cgroup(read)


def _some(pressure: Pressure) -> int:
    return pressure.some_total


def _full(pressure: Pressure) -> int:
    return pressure.full_total


def _most_threads(use: ContainerUsage) -> Iterable[Sample]:
    """0 means no limit."""
    cgroup = use.domain.cgroup
    return one((cgroup.max_tasks if cgroup else None) or 0)


def _hugepages(use: ContainerUsage) -> Iterable[Sample]:
    cgroup = use.domain.cgroup
    return [Sample(page.usage, (page.page_size,)) for page in (cgroup.hugepages if cgroup else ())]


def _most_hugepages(use: ContainerUsage) -> Iterable[Sample]:
    cgroup = use.domain.cgroup
    pages = cgroup.hugepages if cgroup else ()
    return [Sample(page.most, (page.page_size,)) for page in pages if page.most is not None]


def _spec(pick: Callable[[Resources], int | None]) -> Read:
    return lambda use: one(pick(use.container.config.resources))


def _reservation(resources: Resources) -> int:
    """Cgroup v2's memory.low, because CRI has no field for a reservation."""
    text = resources.unified.get("memory.low", "")
    return int(text) if text.isdigit() else 0


def _sockets(use: ContainerUsage) -> Iterable[Sample]:
    process = use.domain.process
    return () if process is None or process.sockets is None else one(process.sockets)


def _open_files(use: ContainerUsage) -> Iterable[Sample]:
    process = use.domain.process
    if process is None or process.max_descriptors is None:
        return ()
    return (Sample(process.max_descriptors, ("max_open_files",)),)


def _network(pick: Callable[[InterfaceUsage], int]) -> Callable[[SandboxUsage], Iterable[Sample]]:
    return lambda use: [Sample(pick(interface), (interface.name,)) for interface in use.interfaces]


_CPU = (
    counter("container_cpu_usage_seconds_total", "CPU time of the VM and its QEMU.", _cpu_total, "cpu"),
    counter(
        "container_cpu_user_seconds_total", "CPU time in user mode, guest code included.", cpu(lambda c: c.cpu_user)
    ),
    counter("container_cpu_system_seconds_total", "CPU time in the host's kernel.", cpu(lambda c: c.cpu_system)),
    counter(
        "container_cpu_cfs_periods_total",
        "Periods of the CPU quota that have passed.",
        _cgroup_count(lambda c: c.cpu_periods),
    ),
    counter(
        "container_cpu_cfs_throttled_periods_total",
        "Periods in which the quota ran out.",
        _cgroup_count(lambda c: c.cpu_throttled_periods),
    ),
    counter(
        "container_cpu_cfs_throttled_seconds_total",
        "Time without CPU because the quota had run out.",
        _cgroup_count(lambda c: c.cpu_throttled / SECOND),
    ),
    gauge(
        "container_spec_cpu_period", "Period of the CPU limit in microseconds.", _spec(lambda r: r.cpu_period or None)
    ),
    gauge(
        "container_spec_cpu_quota",
        "CPU time for each period in microseconds.",
        _spec(lambda r: r.cpu_quota if r.cpu_quota > 0 else None),
    ),
    gauge("container_spec_cpu_shares", "Weight of the container on a busy CPU.", _spec(lambda r: r.cpu_shares or None)),
)

_MEMORY = (
    gauge("container_memory_usage_bytes", "Memory of the VM and its QEMU.", _memory(lambda m: m.usage)),
    gauge(
        "container_memory_working_set_bytes",
        "Memory that cannot be reclaimed at once; kubelet evicts pods by this number.",
        _memory(lambda m: m.working_set),
    ),
    gauge(
        "container_memory_rss",
        "Anonymous and shared memory: the RAM that the guest has touched, and QEMU's own memory.",
        _memory(lambda m: m.rss),
    ),
    gauge("container_memory_swap", "Memory in the host's swap.", _memory(lambda m: m.swap)),
    gauge("container_memory_cache", "Page cache that the host keeps for the VM.", _cgroup(lambda c: c.file)),
    gauge(
        "container_memory_mapped_file",
        "Resident pages of files, mostly QEMU's program text.",
        _cgroup_or_process(lambda c: c.mapped_file, lambda p: p.file),
    ),
    gauge("container_memory_kernel_usage", "Memory of the host's kernel for the VM.", _cgroup(lambda c: c.kernel)),
    gauge(
        "container_memory_max_usage_bytes",
        "Highest memory usage so far.",
        _cgroup_or_process(lambda c: c.peak_memory, lambda p: p.peak_resident),
    ),
    counter(
        "container_memory_failcnt", "How often the memory limit was reached.", _cgroup_count(lambda c: c.limit_hits)
    ),
    counter(
        "container_memory_failures_total",
        "Page faults of QEMU; they include the guest's first access to each page of its RAM.",
        _faults,
        "failure_type",
        "scope",
    ),
    counter(
        "container_oom_events_total", "Processes killed because memory ran out.", _cgroup_count(lambda c: c.oom_kills)
    ),
    gauge("container_spec_memory_limit_bytes", "Memory limit, 0 without one.", _spec(lambda r: r.memory_limit_bytes)),
    gauge(
        "container_spec_memory_swap_limit_bytes",
        "Limit of memory and swap together, 0 without one.",
        _spec(lambda r: r.memory_swap_limit_bytes),
    ),
    gauge(
        "container_spec_memory_reservation_limit_bytes",
        "Memory that the container keeps under memory pressure, 0 for none.",
        _spec(_reservation),
    ),
    gauge("container_hugetlb_usage_bytes", "Huge pages in use.", _hugepages, "pagesize"),
    gauge("container_hugetlb_max_usage_bytes", "Highest usage of huge pages so far.", _most_hugepages, "pagesize"),
)

_PRESSURE = tuple(
    counter(
        f"container_pressure_{what}_{word}_seconds_total",
        f"Time in which {who} waited for {name}.",
        _pressure(what, pick),
    )
    for what, name in (("cpu", "a CPU"), ("io", "I/O"), ("memory", "memory"))
    for word, who, pick in (("waiting", "some of QEMU's threads", _some), ("stalled", "all of QEMU's threads", _full))
)

_DISKS = (
    gauge(
        "container_fs_usage_bytes",
        "Bytes on disk of the container's own files, mostly its root disk.",
        _disk(lambda d: d.used_bytes),
        "device",
    ),
    gauge(
        "container_fs_limit_bytes",
        "Size of the file system with the container's files.",
        _disk(lambda d: d.filesystem_bytes),
        "device",
    ),
    gauge(
        "container_fs_inodes_total",
        "Inodes of the file system with the container's files.",
        _disk(lambda d: d.filesystem_inodes),
        "device",
    ),
    gauge(
        "container_fs_inodes_free",
        "Free inodes of the file system with the container's files.",
        _disk(lambda d: d.filesystem_inodes_free),
        "device",
    ),
    counter("container_fs_reads_total", "Reads by the guest.", blocks(lambda b: b.reads), "device"),
    counter("container_fs_reads_bytes_total", "Bytes read by the guest.", blocks(lambda b: b.read_bytes), "device"),
    counter("container_fs_writes_total", "Writes by the guest.", blocks(lambda b: b.writes), "device"),
    counter(
        "container_fs_writes_bytes_total", "Bytes written by the guest.", blocks(lambda b: b.write_bytes), "device"
    ),
    counter(
        "container_blkio_device_usage_total",
        "Bytes read and written by the guest.",
        _block_operations,
        "device",
        "operation",
    ),
)

_PROCESSES: tuple[Family[ContainerUsage], ...] = (
    gauge("container_processes", "Processes on the node: QEMU.", _process(lambda _: 1)),
    gauge("container_threads", "Threads of QEMU.", _process(lambda p: p.threads)),
    gauge("container_threads_max", "Limit of threads, 0 for no limit.", _most_threads),
    gauge("container_file_descriptors", "Open descriptors of QEMU.", _process(lambda p: p.descriptors)),
    gauge(
        "container_sockets",
        "Open sockets of QEMU; missing if virtshim runs under its systemd unit, which cannot see them.",
        _sockets,
    ),
    gauge("container_ulimits_soft", "QEMU's soft limits.", _open_files, "ulimit"),
    gauge(
        "container_last_seen",
        "When these numbers were read, in seconds since the epoch.",
        lambda use: one(use.taken_at / SECOND),
    ),
    gauge(
        "container_start_time_seconds",
        "When the container was started, in seconds since the epoch.",
        lambda use: one(use.container.status.started_at / SECOND),
    ),
)

CONTAINER = (*_CPU, *_MEMORY, *_PRESSURE, *_DISKS, *_PROCESSES)


def network_families(prefix: str) -> tuple[Family[SandboxUsage], ...]:
    """Traffic of the guest's NICs, as the guest sees it."""
    return tuple(
        counter(f"{prefix}_network_{way}_{what}_total", text, _network(pick), "interface")
        for way, what, text, pick in (
            ("receive", "bytes", "Bytes received by the guest.", lambda i: i.rx_bytes),
            ("receive", "packets", "Packets received by the guest.", lambda i: i.rx_packets),
            ("receive", "errors", "Damaged packets for the guest.", lambda i: i.rx_errors),
            (
                "receive",
                "packets_dropped",
                "Packets for the guest that were dropped because it did not take them in time.",
                lambda i: i.rx_dropped,
            ),
            ("transmit", "bytes", "Bytes sent by the guest.", lambda i: i.tx_bytes),
            ("transmit", "packets", "Packets sent by the guest.", lambda i: i.tx_packets),
            ("transmit", "errors", "Damaged packets from the guest.", lambda i: i.tx_errors),
            ("transmit", "packets_dropped", "Packets from the guest that the host dropped.", lambda i: i.tx_dropped),
        )
    )


POD = network_families("container")
