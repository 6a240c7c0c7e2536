"""Reads what this machine has: CPUs, memory nodes, huge pages, cgroups, systemd."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from pathlib import Path

from virtshim.model.sizing import numbers_in

_NODES = "/sys/devices/system/node"
_HUGEPAGES = "/sys/kernel/mm/hugepages"
CGROUPS = "/sys/fs/cgroup"


@functools.cache
def cpus() -> int:
    """The number of CPUs that the kernel has configured; they are numbered from 0."""
    return os.sysconf("SC_NPROCESSORS_CONF")


@functools.cache
def memory(file: str = "/proc/meminfo") -> int:
    """Bytes of RAM and swap."""
    facts = (line.split() for line in Path(file).read_text().splitlines())
    return 1024 * sum(int(words[1]) for words in facts if words[0] in ("MemTotal:", "SwapTotal:"))


def available_memory() -> int:
    """Bytes that programs can still get without swapping."""
    facts = (line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return 1024 * sum(int(words[1]) for words in facts if words[0] == "MemAvailable:")


def memory_nodes(folder: str = _NODES) -> int:
    """The highest number of a memory node, plus one."""
    try:
        found = [int(name[4:]) for name in os.listdir(folder) if re.fullmatch(r"node[0-9]+", name)]
    except OSError:  # a kernel without NUMA
        return 1
    return max(found, default=0) + 1


def numa_nodes(folder: str = _NODES) -> dict[int, frozenset[int]]:
    """The CPUs of each node that has memory, by its number; empty on a kernel without NUMA. The kernel refuses to put memory on
    other nodes."""
    found: dict[int, frozenset[int]] = {}
    with contextlib.suppress(OSError, ValueError):
        for node in numbers_in(Path(folder, "has_memory").read_text(encoding="ascii").strip()):
            found[node] = numbers_in(Path(folder, f"node{node}/cpulist").read_text(encoding="ascii").strip())
    return found


def free_hugepages(page_bytes: int, folder: str = _HUGEPAGES) -> int:
    """Bytes in free huge pages of that size; 0 if the kernel has none."""
    try:
        with open(f"{folder}/hugepages-{page_bytes >> 10}kB/free_hugepages", encoding="ascii") as file:
            return int(file.read()) * page_bytes
    except OSError:
        return 0


def uids_in_use(*directories: str, proc: str = "/proc") -> frozenset[int]:
    """The users of processes, and the owners of files in directories below `directories`."""
    found = set()
    for process in _entries(proc):
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                found.add(os.stat(process.path).st_uid)
    for one in (one for directory in directories for one in _entries(directory)):
        for file in _entries(one.path):
            with contextlib.suppress(OSError):  # likewise
                found.add(file.stat(follow_symlinks=False).st_uid)
    return frozenset(found)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    """Empty if it is not a directory, or gone."""
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def boot_id() -> str:
    """An id that changes at each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def has_cgroup_v2(root: str = CGROUPS) -> bool:
    """Whether version 2 is mounted there; otherwise version 1's hierarchies are below it."""
    return os.path.exists(f"{root}/cgroup.controllers")


def systemd_runs() -> bool:
    """Decides as sd_booted(3) does."""
    return os.path.isdir("/run/systemd/system")
