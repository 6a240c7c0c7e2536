"""Reads what the kernel accounts for the cgroup of a VM's QEMU, if the cgroup is that VM's alone. Versions 1 and 2."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from virtshim.model.usage import CgroupUsage, HugepageUsage, Pressure
from virtshim.system.machine import CGROUPS, has_cgroup_v2

# Programs that libvirt runs beside QEMU for the same VM, in the same cgroup.
_COMPANIONS = frozenset({"virtiofsd", "swtpm", "passt", "qemu-pr-helper"})
_HUGEPAGES = re.compile(r"hugetlb\.(\d+[KMG]B)\.(?:current|usage_in_bytes)")
# In version 1 a number near 2^63 means no limit.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class CgroupTree:
    """Where cgroups and processes are visible. `unified`: version 2."""

    root: str = CGROUPS
    proc: str = "/proc"

    @property
    def unified(self) -> bool:
        return has_cgroup_v2(self.root)

    def paths(self, pid: int | str) -> Mapping[str, str]:
        """Controller -> the process's directory; version 2's only entry is "". Raises OSError."""
        found = {}
        with open(f"{self.proc}/{pid}/cgroup", encoding="utf-8") as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                for controller in controllers.split(","):
                    found[controller] = path
        return found


def usage_of(pid: int, tree: CgroupTree) -> CgroupUsage | None:
    """None if QEMU has ended, or shares its cgroup with anything but its own companions."""
    try:
        mine, theirs = tree.paths("self"), tree.paths(pid)
        if tree.unified:
            return _version_2(tree, theirs[""], mine[""], pid)
        return _version_1(tree, theirs, mine, pid)
    except (OSError, KeyError, ValueError):
        return None


def _version_2(tree: CgroupTree, path: str, ours: str, pid: int) -> CgroupUsage | None:
    """The group that accounts memory: the top of a threaded subtree (libvirt's `emulator` and `vcpu0`)."""
    while path != "/" and not os.path.exists(f"{tree.root}{path}/memory.current"):
        path = os.path.dirname(path)
    directory = f"{tree.root}{path}"
    if path in ("/", ours) or not _alone(tree, directory, pid):
        return None
    memory, events = _table(f"{directory}/memory.stat"), _table(f"{directory}/memory.events")
    pressure = {what: _pressure(f"{directory}/{what}.pressure") for what in ("cpu", "memory", "io")}
    usage = CgroupUsage(
        memory=_number(f"{directory}/memory.current") or 0,
        inactive_file=memory["inactive_file"],
        anon=memory["anon"],
        shmem=memory.get("shmem", 0),
        file=memory["file"],
        mapped_file=memory.get("file_mapped", 0),
        limit=_number(f"{directory}/memory.max"),
        kernel=memory.get("kernel"),
        swap=_number(f"{directory}/memory.swap.current"),
        peak_memory=_number(f"{directory}/memory.peak"),
        limit_hits=events.get("max"),
        oom_kills=events.get("oom_kill"),
        max_tasks=_number(f"{directory}/pids.max"),
        pressure={what: value for what, value in pressure.items() if value is not None},
        hugepages=_hugepages(directory, "current", ""),
    )
    return _with_throttling(usage, directory)


def _version_1(tree: CgroupTree, theirs: Mapping[str, str], mine: Mapping[str, str], pid: int) -> CgroupUsage | None:
    path = theirs["memory"]
    directory = f"{tree.root}/memory{path}"
    if path in ("/", mine["memory"]) or not _alone(tree, directory, pid):
        return None
    memory = _table(f"{directory}/memory.stat")
    limit = _number(f"{directory}/memory.limit_in_bytes")
    usage = CgroupUsage(
        memory=_number(f"{directory}/memory.usage_in_bytes") or 0,
        inactive_file=memory["total_inactive_file"],
        # Version 1 counts shared memory as page cache.
        anon=memory["total_rss"],
        shmem=memory.get("total_shmem", 0),
        file=memory["total_cache"],
        mapped_file=memory["total_mapped_file"],
        limit=limit if limit is not None and limit < _NO_LIMIT else None,
        kernel=_number(f"{directory}/memory.kmem.usage_in_bytes"),
        swap=memory.get("total_swap"),
        peak_memory=_number(f"{directory}/memory.max_usage_in_bytes"),
        limit_hits=_number(f"{directory}/memory.failcnt"),
        oom_kills=_table(f"{directory}/memory.oom_control").get("oom_kill"),
    )
    pids, hugetlb, cpu = theirs.get("pids", "/"), theirs.get("hugetlb", "/"), theirs.get("cpu", "/")
    if pids not in ("/", mine.get("pids")):
        usage = replace(usage, max_tasks=_number(f"{tree.root}/pids{pids}/pids.max"))
    if hugetlb not in ("/", mine.get("hugetlb")):
        pages = _hugepages(f"{tree.root}/hugetlb{hugetlb}", "usage_in_bytes", "max_usage_in_bytes")
        usage = replace(usage, hugepages=pages)
    if cpu not in ("/", mine.get("cpu")):
        # libvirt puts QEMU's own threads into `emulator`, and each vCPU into a group beside it.
        usage = _with_throttling(usage, f"{tree.root}/cpu{cpu.removesuffix('/emulator')}")
    return usage


def _alone(tree: CgroupTree, directory: str, pid: int) -> bool:
    """Whether only the VM's processes are in it."""
    with open(f"{directory}/cgroup.procs", encoding="ascii") as file:
        others = {int(word) for word in file.read().split()} - {pid}
    return all(_is_companion(tree, other) for other in others)


def _is_companion(tree: CgroupTree, pid: int) -> bool:
    """True also for a process that has ended, because it belongs to nobody."""
    try:
        with open(f"{tree.proc}/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip() in _COMPANIONS
    except (FileNotFoundError, ProcessLookupError):
        return True


def _with_throttling(usage: CgroupUsage, directory: str) -> CgroupUsage:
    """Adds up throttling: a group counts that of its own quota, and libvirt gives each vCPU a group with a quota."""
    tables = [_table(f"{path}/cpu.stat") for path in (directory, *_threads_below(directory))]

    def total(*names: str) -> int:
        return sum(table.get(name, 0) for table in tables for name in names)

    return replace(
        usage,
        cpu_periods=total("nr_periods"),
        cpu_throttled_periods=total("nr_throttled"),
        cpu_throttled=total("throttled_time") + 1000 * total("throttled_usec"),
    )


def _threads_below(directory: str) -> Iterable[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        return [entry.path for entry in entries if entry.name == "emulator" or re.fullmatch(r"vcpu\d+", entry.name)]
    return []


def _number(path: str) -> int | None:
    """None for "max", and if the kernel does not have the file."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
    except (FileNotFoundError, PermissionError):
        return None
    return int(text) if text.isdigit() else None


def _table(path: str) -> dict[str, int]:
    """Reads lines of a name and a number; empty if the file does not exist."""
    found = {}
    with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
        for line in file:
            name, _, value = line.strip().partition(" ")
            if value.isdigit():
                found[name] = int(value)
    return found


def _pressure(path: str) -> Pressure | None:
    """Reads `some avg10=0.00 avg60=0.00 avg300=0.00 total=0` and the same for `full`, with totals in microseconds. None
    if the kernel keeps no such accounts (opening or reading then fails)."""
    try:
        with open(path, encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return None
    kinds = {words[0]: dict(word.split("=", 1) for word in words[1:]) for words in lines if words}
    if "some" not in kinds:
        return None
    none = {"avg10": "0", "avg60": "0", "avg300": "0", "total": "0"}  # older kernels have no `full` for the CPU
    some, full = kinds["some"], kinds.get("full", none)
    return Pressure(int(some["total"]) * 1000, _averages(some), int(full["total"]) * 1000, _averages(full))


def _averages(fields: Mapping[str, str]) -> tuple[float, float, float]:
    return float(fields["avg10"]), float(fields["avg60"]), float(fields["avg300"])


def _hugepages(directory: str, now: str, most: str) -> tuple[HugepageUsage, ...]:
    found = []
    for name in sorted(os.listdir(directory)):
        match = _HUGEPAGES.fullmatch(name)
        if match:
            size = match[1]
            usage = _number(f"{directory}/hugetlb.{size}.{now}") or 0
            found.append(HugepageUsage(size, usage, _number(f"{directory}/hugetlb.{size}.{most}") if most else None))
    return tuple(found)
