"""Reads what running VMs use, from libvirt's statistics, /proc and cgroups, and how long their agents take to answer."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import libvirt
import structlog

from virtshim.metrics import observed
from virtshim.metrics.observed import Step
from virtshim.model.errors import ShimError
from virtshim.model.usage import BlockUsage, DomainUsage, GuestMemory, VcpuUsage, VmCounters
from virtshim.system.rate_limits import TroubleLog
from virtshim.system.threads import started
from virtshim.vm import cgroup_usage, qemu_process
from virtshim.vm.cgroup_usage import CgroupTree
from virtshim.vm.connection import Connection
from virtshim.vm.errors import code_of

# libvirt's domain statistics: names and numbers.
Stats = Mapping[str, object]

_KIB = 1024


def to_counters(stats: Stats, taken_at: int) -> VmCounters:
    """Numbers that the driver lacks, or that the VM did not answer, are None or empty."""
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
    """Hot-unplugged vCPUs leave gaps in the numbering."""
    found = []
    for number in range(_number(stats, "vcpu.maximum") or 0):
        time = _number(stats, f"vcpu.{number}.time")
        if time is not None:
            wait, delay = _number(stats, f"vcpu.{number}.wait"), _number(stats, f"vcpu.{number}.delay")
            found.append(VcpuUsage(number, time, wait, delay))
    return tuple(found)


def _memory(stats: Stats) -> GuestMemory | None:
    """libvirt's numbers are in KiB. While last-update is 0, the guest's driver has not reported, so its numbers are ignored."""
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
    """If a disk has no request counts, its VM did not answer. It is left out, because 0 would be wrong."""
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


# One libvirt call for the statistics of many VMs, which returns in time even if libvirt or a VM hangs.
#
# A call hangs for ever if one QEMU does not answer its monitor, and with it the numbers of all other VMs. But it holds
# that VM's job lock, and a call with NOWAIT skips the monitor of a VM whose lock is taken. So a late call is abandoned on
# its thread, and the next one gets the numbers of all other VMs.

log = structlog.get_logger(__name__)

Read = Callable[[Collection[uuid.UUID]], Mapping[uuid.UUID, Stats]]

# libvirtd handles 5 calls of a client at a time (max_client_requests). Abandoned calls must leave room for others.
_MAX_CALLS: Final = 3

# While guests boot, late and timely calls alternate every second. So the trouble is over only if no call was late for this
# many seconds.
_CALM: Final = 60.0


@dataclass(eq=False)
class _Call:
    """`started` in seconds of time.monotonic()."""

    wanted: Collection[uuid.UUID]
    started: float
    finished: queue.SimpleQueue[_Call]
    rows: Mapping[uuid.UUID, Stats] = field(default_factory=dict)
    taken_at: int = 0


class BulkStats:
    """`timeout`: seconds for each of at most three attempts. `calm`: see _CALM. Calls in flight, abandoned ones included, are
    limited. Thread-safe."""

    def __init__(self, read: Read, timeout: float = 1.0, calm: float = _CALM) -> None:
        self._read = read
        self._calm = calm
        self._late_until = 0.0
        self._timeout = timeout
        self._limit = timeout * _MAX_CALLS
        self._changed = threading.Condition()
        self._running: list[_Call] = []
        self._trouble = TroubleLog(log, over="libvirt.statistics.back")

    def latest(self, wanted: Collection[uuid.UUID]) -> tuple[int, Mapping[uuid.UUID, Stats]]:
        """The time of the reading (ns since the epoch), and the numbers of each wanted VM that could be read; none if libvirt
        does not answer. Never raises."""
        until = time.monotonic() + self._limit
        finished: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        while (left := until - time.monotonic()) > 0 and self._begin(wanted, finished, min(left, self._timeout)):
            try:
                # An earlier call that is only slow may still return first.
                call = finished.get(timeout=min(left, self._timeout))
            except queue.Empty:
                self._late_until = time.monotonic() + self._calm
                self._trouble.met("libvirt.statistics.late", seconds=self._timeout)
            else:
                return call.taken_at, call.rows
        return time.time_ns(), {}

    def _begin(self, wanted: Collection[uuid.UUID], finished: queue.SimpleQueue[_Call], timeout: float) -> bool:
        """Starts a call; if there are too many, waits until one ends. False if all of them are abandoned."""
        with self._changed:
            if self._all_left_behind():
                return False
            self._changed.wait_for(lambda: len(self._running) < _MAX_CALLS, timeout)
            if len(self._running) >= _MAX_CALLS:
                return True  # one of them may be ours
            call = _Call(wanted, time.monotonic(), finished)
            started(threading.Thread(target=self._run, args=(call,), name="vm-statistics", daemon=True))
            self._running.append(call)  # the thread needs the lock before it removes the call
        return True

    def _all_left_behind(self) -> bool:
        oldest = time.monotonic() - self._limit
        return len(self._running) >= _MAX_CALLS and all(call.started < oldest for call in self._running)

    def _run(self, call: _Call) -> None:
        try:
            call.rows = self._read(call.wanted)
            if time.monotonic() - call.started < self._timeout and time.monotonic() > self._late_until:
                self._trouble.over()
        except ShimError as exc:
            self._trouble.met("libvirt.statistics.failed", error=str(exc))
        finally:
            call.taken_at = time.time_ns()
            with self._changed:
                self._running.remove(call)
                self._changed.notify_all()
            call.finished.put(call)


class BusyVms:
    """VMs that libvirt is starting or ending for us. libvirt locks them meanwhile, so calls that ask about them wait.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Counter[uuid.UUID] = Counter()

    @contextlib.contextmanager
    def held(self, domain: uuid.UUID) -> Iterator[None]:
        with self._lock:
            self._held[domain] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[domain] -= 1
                if not self._held[domain]:
                    del self._held[domain]

    def others(self, domains: Collection[uuid.UUID]) -> list[uuid.UUID]:
        """Those of `domains` that are not busy."""
        with self._lock:
            return [domain for domain in domains if domain not in self._held]


# No interface statistics: libvirt does not know the NICs, which vmwrapper adds.
_GROUPS: Final = (
    libvirt.VIR_DOMAIN_STATS_STATE
    | libvirt.VIR_DOMAIN_STATS_CPU_TOTAL
    | libvirt.VIR_DOMAIN_STATS_BALLOON
    | libvirt.VIR_DOMAIN_STATS_VCPU
    | libvirt.VIR_DOMAIN_STATS_BLOCK
)
_FLAGS: Final = libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_ACTIVE | libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT

# Unused handles are dropped when there are more than this.
_SPARE: Final = 64


class VmStatistics:
    """Reads the numbers of all VMs in one call, except those of busy VMs, which would delay it. Keeps the VMs' handles, because a
    look-up is a call too. Thread-safe."""

    def __init__(self, connection: Connection, busy: BusyVms) -> None:
        self._connection = connection
        self._busy = busy
        self._conn: libvirt.virConnect | None = None
        self._handles: dict[uuid.UUID, libvirt.virDomain] = {}

    def read(self, wanted: Collection[uuid.UUID]) -> Mapping[uuid.UUID, Stats]:
        """Leaves out VMs that are off. Raises ShimError."""
        with self._connection.using("read the statistics of VMs") as conn:
            asked = self._handles_of(conn, self._busy.others(wanted))
            # An empty list would mean all.
            rows = conn.domainListGetStats(list(asked.values()), _GROUPS, _FLAGS) if asked else []
            found = {uuid.UUID(domain.UUIDString()): stats for domain, stats in rows}
        for off in asked.keys() - found.keys():
            self._handles.pop(off, None)
        return found

    def _handles_of(
        self, conn: libvirt.virConnect, wanted: Collection[uuid.UUID]
    ) -> Mapping[uuid.UUID, libvirt.virDomain]:
        handles = self._handles
        if self._conn is not conn or len(handles) > len(wanted) + _SPARE:
            self._conn, self._handles = conn, {}
            handles = self._handles
        for domain in wanted:
            if domain not in handles:
                try:
                    handles[domain] = conn.lookupByUUID(domain.bytes)
                except libvirt.libvirtError as exc:
                    if code_of(exc) != libvirt.VIR_ERR_NO_DOMAIN:
                        raise
        return {domain: handles[domain] for domain in wanted if domain in handles}


class LibvirtReadings:
    """Implements `virtshim.vm.ports.VmReadings`. `pid_directory`: see `qemu_process.pid_directory`."""

    def __init__(self, stats: BulkStats, pid_directory: str) -> None:
        self._stats = stats
        self._pids = pid_directory
        self._tree = CgroupTree()

    def usage(self, wanted: Mapping[uuid.UUID, str]) -> Mapping[uuid.UUID, DomainUsage]:
        if not wanted:
            return {}
        taken_at, rows = self._stats.latest(wanted.keys())
        found = {}
        for domain, name in wanted.items():
            stats = rows.get(domain)
            pid = qemu_process.find(self._pids, name, domain) if self._pids else None
            if stats is None and pid is None:
                continue
            found[domain] = DomainUsage(
                counters=None if stats is None else to_counters(stats, taken_at),
                process=None if pid is None else qemu_process.usage_of(pid),
                cgroup=None if pid is None else cgroup_usage.usage_of(pid, self._tree),
            )
        return found


class AgentArrivals:
    """Measures the time from a guest's start until its agent is up. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._awaited: dict[uuid.UUID, tuple[float, Callable[[], None]]] = {}

    def begin(self, domain: uuid.UUID) -> None:
        with self._lock:
            self._awaited[domain] = time.monotonic(), observed.tracer().later(Step.AGENT.value)

    def arrived(self, domain: uuid.UUID) -> None:
        """Counts once per start, because the agent or the guest may restart."""
        with self._lock:
            awaited = self._awaited.pop(domain, None)
        if awaited is not None:
            began, ended = awaited
            ended()
            observed.meter().took(Step.AGENT, observed.OK, time.monotonic() - began)

    def forget(self, domain: uuid.UUID) -> None:
        with self._lock:
            self._awaited.pop(domain, None)
