"""What VMs use: raw readings, and CRI's numbers computed from them. No I/O.

None means that a number is unknown; it is never a 0. Times are nanoseconds, sizes bytes, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from virtshim.model.ids import ContainerId


@dataclass(frozen=True, slots=True)
class VcpuUsage:
    """`time`: on a CPU. `wait`: for I/O or a lock in QEMU. `delay`: ready, but without a CPU."""

    number: int
    time: int
    wait: int | None = None
    delay: int | None = None


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """One disk as the guest uses it, counted since the VM started. `device`: libvirt's target name."""

    device: str
    reads: int = 0
    read_bytes: int = 0
    read_time: int = 0
    writes: int = 0
    write_bytes: int = 0
    write_time: int = 0
    flushes: int = 0
    flush_time: int = 0


@dataclass(frozen=True, slots=True)
class GuestMemory:
    """`maximum`: what the VM was given. `current`: what the balloon leaves it. The others come from the guest's balloon
    driver every 10 s, None if it has not reported. Faults and swap are counts and bytes since the guest booted."""

    maximum: int
    current: int
    available: int | None = None
    unused: int | None = None
    usable: int | None = None
    disk_caches: int | None = None
    swap_in: int | None = None
    swap_out: int | None = None
    major_faults: int | None = None
    minor_faults: int | None = None


@dataclass(frozen=True, slots=True)
class VmCounters:
    """libvirt's counters of one running VM. `taken_at` since the epoch; CPU times since the VM was started."""

    taken_at: int
    cpu: int | None = None
    cpu_user: int | None = None
    cpu_system: int | None = None
    vcpus: tuple[VcpuUsage, ...] = ()
    memory: GuestMemory | None = None
    blocks: tuple[BlockUsage, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """QEMU's process. `anon`, `file` and `shmem` are the parts of its resident memory; `max_descriptors` the soft limit,
    None if there is none."""

    pid: int
    anon: int
    file: int
    shmem: int
    swap: int
    peak_resident: int
    threads: int
    minor_faults: int
    major_faults: int
    descriptors: int
    sockets: int | None
    max_descriptors: int | None

    @property
    def resident(self) -> int:
        return self.anon + self.file + self.shmem


@dataclass(frozen=True, slots=True)
class Pressure:
    """Time during which some, or all, tasks of a cgroup waited: total, and averages over 10, 60 and 300 s in
    percent."""

    some_total: int
    some_averages: tuple[float, float, float]
    full_total: int
    full_averages: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class HugepageUsage:
    """`page_size`: as kubelet spells it ("2MB"). `most`: the highest value so far."""

    page_size: str
    usage: int
    most: int | None = None


@dataclass(frozen=True, slots=True)
class CgroupUsage:
    """The cgroup of this VM's QEMU alone. None for what the kernel does not account. `limit`: None if there is none.
    `limit_hits` and `oom_kills`: counts. The numbers of CPU periods are 0 without a CPU quota."""

    memory: int
    inactive_file: int
    anon: int
    shmem: int
    file: int
    mapped_file: int
    limit: int | None = None
    kernel: int | None = None
    swap: int | None = None
    peak_memory: int | None = None
    limit_hits: int | None = None
    oom_kills: int | None = None
    cpu_periods: int = 0
    cpu_throttled_periods: int = 0
    cpu_throttled: int = 0
    max_tasks: int | None = None
    pressure: Mapping[str, Pressure] = field(default_factory=dict)
    hugepages: tuple[HugepageUsage, ...] = ()


@dataclass(frozen=True, slots=True)
class DomainUsage:
    """One running VM. A part is None if it could not be read; `cgroup` also if QEMU has none of its own."""

    counters: VmCounters | None = None
    process: ProcessUsage | None = None
    cgroup: CgroupUsage | None = None


@dataclass(frozen=True, slots=True)
class InterfaceUsage:
    """One guest NIC as the guest sees it: `rx` is what it received. `name`: the pod's interface name."""

    name: str
    rx_bytes: int = 0
    rx_packets: int = 0
    rx_errors: int = 0
    rx_dropped: int = 0
    tx_bytes: int = 0
    tx_packets: int = 0
    tx_errors: int = 0
    tx_dropped: int = 0


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """What a container's files take on the file system of `directory` (holes not counted), and how large that file
    system is. `taken_at`: since the epoch."""

    taken_at: int
    directory: str
    used_bytes: int
    inodes_used: int
    filesystem_bytes: int
    filesystem_inodes: int
    filesystem_inodes_free: int


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """`total`: since the VM started. `nano_cores`: over the last second or more, None before a second sample."""

    taken_at: int
    total: int
    nano_cores: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """`available`: None without a limit."""

    usage: int
    working_set: int
    rss: int
    page_faults: int | None = None
    major_page_faults: int | None = None
    available: int | None = None
    swap: int | None = None


def memory_of(usage: DomainUsage, limit: int) -> MemoryUsage | None:
    """The memory that the VM takes on the node, including QEMU's own. kubelet decides about evictions by this number,
    so it is the node's view, not the guest's. None if neither cgroup nor process is known.

    A cgroup of the VM's own gives the best number: all memory except droppable page cache. Without such a cgroup, this
    adds the process's anonymous and shared memory (guest RAM is one of the two). It leaves out file pages: they are
    QEMU's program text, which all VMs share and which can be dropped. `limit`: the container's memory limit, 0 for
    none. A limit of the VM's cgroup takes precedence, because the kernel enforces that one.
    """
    cgroup, process = usage.cgroup, usage.process
    if cgroup is not None:
        total = cgroup.memory
        working_set = max(0, total - cgroup.inactive_file)
        rss = cgroup.anon + cgroup.shmem
    elif process is not None:
        total = process.resident
        working_set = rss = process.anon + process.shmem
    else:
        return None
    if cgroup is not None and cgroup.limit is not None:
        limit = cgroup.limit
    return MemoryUsage(
        usage=total,
        working_set=working_set,
        rss=rss,
        page_faults=process.minor_faults + process.major_faults if process else None,
        major_page_faults=process.major_faults if process else None,
        available=max(0, limit - working_set) if limit else None,
        swap=cgroup.swap if cgroup is not None and cgroup.swap is not None else process.swap if process else None,
    )


def total_memory(parts: Iterable[MemoryUsage]) -> MemoryUsage | None:
    """The memory of a pod: that of its VMs. None if there is none."""
    uses = list(parts)
    if not uses:
        return None
    return MemoryUsage(
        usage=sum(use.usage for use in uses),
        working_set=sum(use.working_set for use in uses),
        rss=sum(use.rss for use in uses),
        page_faults=_sum(use.page_faults for use in uses),
        major_page_faults=_sum(use.major_page_faults for use in uses),
        available=_sum(use.available for use in uses),
        swap=_sum(use.swap for use in uses),
    )


def total_cpu(parts: Iterable[CpuUsage]) -> CpuUsage | None:
    """The CPU time of a pod's VMs, as old as the oldest sample. None if there is none."""
    uses = list(parts)
    if not uses:
        return None
    return CpuUsage(
        taken_at=min(use.taken_at for use in uses),
        total=sum(use.total for use in uses),
        nano_cores=_sum(use.nano_cores for use in uses),
    )


def _sum(numbers: Iterable[int | None]) -> int | None:
    """None if any of them is not known."""
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


# Two samples closer together than this give no rate worth telling.
_SHORTEST_WINDOW = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Sampled:
    use: CpuUsage
    base_at: int
    base_total: int


class CpuMeter:
    """Remembers the last CPU sample of each container: for the rate, and to repeat it while there is no newer one.
    Not thread-safe."""

    def __init__(self) -> None:
        self._last: dict[ContainerId, _Sampled] = {}

    def take(self, container: ContainerId, counters: VmCounters | None) -> CpuUsage | None:
        """The newest sample: that of `counters` if they have one, else the last one. The total never falls, because
        kubelet takes a smaller total for a restart."""
        last = self._last.get(container)
        if counters is None or counters.cpu is None:
            return last.use if last else None
        if last is None:
            use = CpuUsage(counters.taken_at, counters.cpu)
            self._last[container] = _Sampled(use, use.taken_at, use.total)
            return use
        total = max(counters.cpu, last.use.total)
        window = counters.taken_at - last.base_at
        if window >= _SHORTEST_WINDOW:
            rate = (total - last.base_total) * 1_000_000_000 // window
            use = CpuUsage(counters.taken_at, total, rate)
            self._last[container] = _Sampled(use, use.taken_at, total)
        elif window < 0:  # the wall clock was set back
            use = CpuUsage(counters.taken_at, total, last.use.nano_cores)
            self._last[container] = _Sampled(use, use.taken_at, total)
        else:
            use = CpuUsage(counters.taken_at, total, last.use.nano_cores)
            self._last[container] = _Sampled(use, last.base_at, last.base_total)
        return use

    def retain_only(self, containers: Iterable[ContainerId]) -> None:
        wanted = set(containers)
        self._last = {container: sampled for container, sampled in self._last.items() if container in wanted}
