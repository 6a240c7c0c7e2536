"""Plans a VM's cgroup: its hierarchies, and the value of each file, for cgroup v1, v2 and both together. Pure.

Requests use CRI's units: `cpu_shares` as in cgroup v1, quota and period in microseconds, sizes in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tapmanager.errors import invalid
from tapmanager.fields import HEX64, BadField, Json, as_object, as_text, number, objects, refuse_unknown, text

# The parent of VMs whose pod names none. virtshim owns it and removes it when it is empty.
OWN_PARENT = "/virtshim"

# A VM gets a cgroup in the hierarchies with these controllers, and in all others that have its pod's cgroup.
_NEEDED = frozenset({"cpu", "cpuacct", "cpuset", "memory", "pids"})

_LARGEST = 2**63 - 1
# Threads: one per vCPU (at most 255), and about 64 for disk I/O. A process with more is no longer a normal QEMU.
_MOST_THREADS = 1024
_DEFAULT_PERIOD = 100_000
_CPUS = re.compile(r"[0-9,-]{0,4096}")
_UNIFIED = re.compile(r"[a-z]+(?:\.[a-z]+)+")


@dataclass(frozen=True, slots=True)
class RequestedLimits:
    """0 and "" mean not set; for `quota` and `memory`, no limit. `swap`: the limit of swap alone, None for no limit. `hugepages`:
    bytes by page size in bytes. `unified`: cgroup v2 files and their values."""

    shares: int = 0
    quota: int = 0
    period: int = 0
    cpus: str = ""
    mems: str = ""
    memory: int = 0
    swap: int | None = None
    hugepages: Mapping[int, int] = field(default_factory=dict)
    unified: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, obj: Json, where: str) -> RequestedLimits:
        """Raises BadField."""
        names = ("cpu_shares", "cpu_quota", "cpu_period", "cpuset_cpus", "cpuset_mems", "memory", "swap")
        refuse_unknown(obj, (*names, "hugepages", "unified"), where)
        pages = {
            number(page, "page_size", where, 4096, _LARGEST): number(page, "limit", where, 0, _LARGEST)
            for page in objects(obj, "hugepages", where)
        }
        unified = as_object(obj.get("unified", {}), f"{where}.unified")
        return cls(
            shares=number(obj, "cpu_shares", where, 0, _LARGEST),
            quota=number(obj, "cpu_quota", where, 0, _LARGEST),
            period=number(obj, "cpu_period", where, 0, 1_000_000),
            cpus=_cpus(obj, "cpuset_cpus", where),
            mems=_cpus(obj, "cpuset_mems", where),
            memory=number(obj, "memory", where, 0, _LARGEST),
            swap=None if obj.get("swap") is None else number(obj, "swap", where, 0, _LARGEST),
            hugepages=pages,
            unified={_file(key, where): _value(value, where) for key, value in unified.items()},
        )


def _cpus(obj: Json, name: str, where: str) -> str:
    value = text(obj, name, where)
    if not _CPUS.fullmatch(value):
        raise BadField(f"{where}.{name}: must be a list such as 0-3,7")
    return value


def _file(key: str, where: str) -> str:
    if not _UNIFIED.fullmatch(key):
        raise BadField(f"{where}.unified: not the name of a cgroup file: {key[:40]!r}")
    return key


def _value(value: object, where: str) -> str:
    word = as_text(value, f"{where}.unified")
    if not word or len(word) > 64 or not word.isprintable():
        raise BadField(f"{where}.unified: not a value: {word[:40]!r}")
    return word


def cgroup_path(parent: str, container: str, where: str) -> str:
    """The group's path below each hierarchy's root. Raises BadField for a path that could lead elsewhere."""
    if not HEX64.fullmatch(container):
        raise BadField(f"{where}.container: not a container id: {container[:80]!r} (64 hex digits expected)")
    parts = parent.split("/")[1:] if parent != "/" else []
    if not parent.startswith("/") or any(part in ("", ".", "..") or not part.isprintable() for part in parts):
        raise BadField(f"{where}.parent: not a plain absolute path: {parent[:200]!r}")
    return f"{parent.rstrip('/')}/virtshim-{container}"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """`root`: the mount point. `controllers`: for v2, the controllers that the root offers."""

    root: str
    controllers: frozenset[str]
    is_v2: bool

    @property
    def is_needed(self) -> bool:
        return bool(self.controllers & _NEEDED)


def parse_mountinfo(mountinfo: str) -> Sequence[tuple[str, frozenset[str], bool]]:
    """Parses proc_pid_mountinfo(5) into (mount point, v1 controllers and names, is v2) for each cgroup mount. If mounts cover
    each other, the last one wins."""
    found: dict[str, tuple[str, frozenset[str], bool]] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        place, after = left.split(), right.split()
        if len(place) > 4 and len(after) > 2 and after[0] in ("cgroup", "cgroup2"):
            point = place[4].replace("\\040", " ")
            options = frozenset(after[2].split(",")) - {"rw", "ro", "xattr"}
            found[point] = (point, options if after[0] == "cgroup" else frozenset(), after[0] == "cgroup2")
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Setting:
    """One value for one file. `field`: the request's name for it, for messages; "" means that no request asked for the value,
    so it is skipped if the file does not exist."""

    controller: str
    file: str
    value: str
    field: str


def settings(limits: RequestedLimits, hierarchies: Sequence[Hierarchy]) -> Sequence[tuple[Hierarchy, Setting]]:
    """The settings in the order of writing. Raises TapmanagerError (invalid) for a limit without a controller on this machine."""
    planned: list[tuple[Hierarchy, Setting]] = []
    for controller, (v1, v2) in _by_controller(limits).items():
        home = next((one for one in hierarchies if controller in one.controllers), None)
        if home is None:
            if asked := [setting for setting in v2 if setting.field and setting.value != "max"]:
                raise invalid(f"{asked[0].field}: this machine has no cgroup controller {controller}")
            continue
        planned += [(home, setting) for setting in (v2 if home.is_v2 else v1)]
    return planned


def _by_controller(limits: RequestedLimits) -> Mapping[str, tuple[list[Setting], list[Setting]]]:
    """controller -> (settings for v1, settings for v2)"""
    hugetlb = [_hugepage(size, limit) for size, limit in sorted(limits.hugepages.items())]
    threads = Setting("pids", "pids.max", str(_MOST_THREADS), "")
    by = {
        "cpu": (_cpu_v1(limits), _cpu_v2(limits)),
        "cpuset": (_cpuset(limits), _cpuset(limits)),
        "memory": (_memory_v1(limits), _memory_v2(limits)),
        "hugetlb": ([one for one, _ in hugetlb], [two for _, two in hugetlb]),
        "pids": ([threads], [threads]),
    }
    for key, value in sorted(limits.unified.items()):
        controller = key.partition(".")[0]
        v1, v2 = by.setdefault(controller, ([], []))
        v1.append(Setting(controller, "", value, f"unified[{key}]"))  # v1 has no such file and refuses it
        v2.append(Setting(controller, key, value, f"unified[{key}]"))
    return by


def weight(shares: int) -> int:
    """Converts v1's shares to v2's weight in the same way as kubelet, so that VMs and containers keep their proportions."""
    return 1 + (min(max(shares, 2), 262_144) - 2) * 9999 // 262_142


def _cpu_v1(limits: RequestedLimits) -> list[Setting]:
    found = []
    if limits.shares:
        found.append(Setting("cpu", "cpu.shares", str(max(limits.shares, 2)), "cpu_shares"))
    # Quota and period are written separately. The quota is removed first, so that no intermediate pair exceeds the pod's.
    found.append(Setting("cpu", "cpu.cfs_quota_us", "-1", "cpu_quota"))
    if limits.quota:
        found.append(Setting("cpu", "cpu.cfs_period_us", str(limits.period or _DEFAULT_PERIOD), "cpu_period"))
        found.append(Setting("cpu", "cpu.cfs_quota_us", str(limits.quota), "cpu_quota"))
    return found


def _cpu_v2(limits: RequestedLimits) -> list[Setting]:
    found = [Setting("cpu", "cpu.weight", str(weight(limits.shares)), "cpu_shares")] if limits.shares else []
    value = f"{limits.quota} {limits.period or _DEFAULT_PERIOD}" if limits.quota else "max"
    return [*found, Setting("cpu", "cpu.max", value, "cpu_quota")]


def _cpuset(limits: RequestedLimits) -> list[Setting]:
    wanted = (("cpuset.cpus", limits.cpus, "cpuset_cpus"), ("cpuset.mems", limits.mems, "cpuset_mems"))
    return [Setting("cpuset", file, value, name) for file, value, name in wanted if value]


def _memory_v1(limits: RequestedLimits) -> list[Setting]:
    value = str(limits.memory) if limits.memory else "-1"
    memory = Setting("memory", "memory.limit_in_bytes", value, "memory")
    if limits.swap is None:
        return [memory]
    both = "memory.memsw.limit_in_bytes"  # must not be below the other limit, so it is removed first
    total = str(limits.memory + limits.swap) if limits.memory else "-1"
    return [Setting("memory", both, "-1", "swap"), memory, Setting("memory", both, total, "swap")]


def _memory_v2(limits: RequestedLimits) -> list[Setting]:
    found = [Setting("memory", "memory.max", str(limits.memory) if limits.memory else "max", "memory")]
    if limits.swap is not None:
        found.append(Setting("memory", "memory.swap.max", str(limits.swap), "swap"))
    return found


def _hugepage(size: int, limit: int) -> tuple[Setting, Setting]:
    name = next(f"{size >> shift}{unit}" for shift, unit in ((30, "GB"), (20, "MB"), (10, "KB")) if size >> shift)
    field_name = f"hugepages[{size}]"
    return (
        Setting("hugetlb", f"hugetlb.{name}.limit_in_bytes", str(limit), field_name),
        Setting("hugetlb", f"hugetlb.{name}.max", str(limit), field_name),
    )
