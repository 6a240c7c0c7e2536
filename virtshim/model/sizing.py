"""How big a VM is, and what its cgroup may use: from a container's resources, the pod's overhead and the node's
settings. Pure."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.annotations.options import MAX_NIC_QUEUES, VmOptions
from virtshim.model.cgroup import CgroupLimits, VmCgroup, is_pods_own
from virtshim.model.container import Container, Resources
from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.model.hardware import Firmware, FirmwareFiles, NicModel, Topology
from virtshim.model.sandbox import Sandbox
from virtshim.model.vm import NumaCell, VmSize

# Validates resources, and merges a change into them.

DEFAULT_PERIOD = 100_000

# The kernel's bounds of CFS periods and quotas, microseconds.
_PERIODS = (1000, 1_000_000)
_SMALLEST_QUOTA = 1000
# kubelet's factor, of cgroup v1.
_SHARES_OF_A_CPU = 1024
_LARGEST = 2**63 - 1
# kubelet's value for a container that requests no CPU.
_LEAST_SHARES = 2

# What `sized_by` returns.
CPU_REQUEST: Final = "resources.requests.cpu"
MEMORY_REQUEST: Final = "resources.requests.memory"
DEFAULT_MEMORY: Final = "vm.default_memory: no limit, and no request that CRI shows"

# QEMU's memory besides the guest's: 25 MiB of device models (measured), and up to 100 MiB with TCG for translated code,
# which libvirt is told to limit. The daemon that serves volumes is in the pod's cgroup, too.
LEAST_OVERHEAD = 128 << 20
# Page tables grow with the guest: each of them takes 1/512 of its memory (measured). There are at most four: of QEMU,
# the processor, the IOMMU and the daemon that serves volumes.
_GROWING_PART = 128
_MIB = 1 << 20

_LIST = re.compile(r"[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*")
_PAGE_SIZE = re.compile(r"([1-9][0-9]{0,5})(KB|MB|GB)")
_PAGE_UNITS = {"KB": 10, "MB": 20, "GB": 30}
# The `unified` files that kubelet sends and that matter for a VM. `memory.max` and the like come from other fields.
_SIZES = frozenset({"memory.min", "memory.low", "memory.high", "memory.swap.max", "memory.swap.high"})
_FLAGS = frozenset({"memory.oom.group"})
_UNIFIED = _SIZES | _FLAGS
_NUMBER = re.compile(r"[0-9]{1,19}")


# The bytes that 46 bits of physical address reach, as most x86-64 processors have.
_MAX_MEMORY: Final = 1 << 46


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """The node's limits: bytes and counts. `room_*`: how far a VM can be resized if its pod does not say, 0: not at
    all. `overhead`: bytes for QEMU if the pod has no overhead. `max_root_volume`: 0 for no limit. `memory`: the node's RAM and
    swap, 0 if unknown."""

    default_memory: int
    min_memory: int
    max_vcpus: int
    room_vcpus: int = 0
    room_memory: int = 0
    overhead: int = 256 << 20
    max_root_volume: int = 0
    memory: int = 0


# --- faults ----------------------------------------------------------------------------------------------------------


def faults(resources: Resources, where: str, *, cpus: int, mems: int) -> Iterable[str]:
    """Invalid values, each with its field below `where`. `cpus` and `mems`: how many CPUs and memory nodes the node has."""
    for name in ("cpu_shares", "cpu_period", "memory_limit_bytes"):
        if getattr(resources, name) < 0:
            yield f"{where}.{_WIRE.get(name, name)} is negative"
    if resources.cpu_quota < -1:
        yield f"{where}.cpu_quota {resources.cpu_quota} is neither -1 (no limit) nor a number of microseconds"
    if 0 < resources.cpu_quota < _SMALLEST_QUOTA:
        yield f"{where}.cpu_quota {resources.cpu_quota} is less than {_SMALLEST_QUOTA} microseconds"
    if resources.cpu_period and not _PERIODS[0] <= resources.cpu_period <= _PERIODS[1]:
        yield f"{where}.cpu_period {resources.cpu_period} is not within {_PERIODS[0]} to {_PERIODS[1]} microseconds"
    if not -1000 <= resources.oom_score_adj <= 1000:
        yield f"{where}.oom_score_adj {resources.oom_score_adj} is not within -1000 to 1000"
    swap = resources.memory_swap_limit_bytes
    if swap > 0 and swap < resources.memory_limit_bytes:
        yield f"{where}.memory_swap_limit_in_bytes {swap} is less than memory_limit_in_bytes: it counts both together"
    yield from _cpuset_faults(resources.cpuset_cpus, f"{where}.cpuset_cpus", cpus, "CPU")
    yield from _cpuset_faults(resources.cpuset_mems, f"{where}.cpuset_mems", mems, "memory node")
    yield from _hugepage_faults(resources.hugepage_limits, f"{where}.hugepage_limits")
    yield from _unified_faults(resources.unified, f"{where}.unified")


_WIRE: Mapping[str, str] = {"memory_limit_bytes": "memory_limit_in_bytes"}


def _cpuset_faults(text: str, field: str, count: int, what: str) -> Iterable[str]:
    if not text:
        return
    if len(text) > 4096 or not _LIST.fullmatch(text):
        yield f"{field} {text[:80]!r} is not a list like 0-3,7"
        return
    for part in text.split(","):
        low, _, high = part.partition("-")
        if int(high or low) < int(low):
            yield f"{field}: {part} counts backwards"
        elif int(high or low) >= count:
            yield f"{field}: there is no {what} {high or low}, this node has 0 to {count - 1}"


def _hugepage_faults(limits: Mapping[str, int], field: str) -> Iterable[str]:
    for size, limit in limits.items():
        if not _PAGE_SIZE.fullmatch(size):
            yield f"{field}: {size[:40]!r} is not a page size like 2MB or 1GB"
        elif limit < 0 or limit > _LARGEST:
            yield f"{field}[{size}] {limit} is not a size"
        elif limit % page_bytes(size):
            yield f"{field}[{size}] {limit} is not a whole number of pages"
    used = sorted(size for size, limit in limits.items() if limit > 0)
    if len(used) > 1:
        yield f"{field}: a virtual machine's memory has pages of one size, not of {' and '.join(used)}"


def _unified_faults(unified: Mapping[str, str], field: str) -> Iterable[str]:
    for key, value in sorted(unified.items()):
        if key not in _UNIFIED:
            yield f"{field}[{key[:80]}] is not one of {', '.join(sorted(_UNIFIED))}"
        elif key in _FLAGS and value not in ("0", "1"):
            yield f"{field}[{key}] {value[:40]!r} is neither 0 nor 1"
        elif key in _SIZES and value != "max" and (not _NUMBER.fullmatch(value) or int(value) > _LARGEST):
            yield f"{field}[{key}] {value[:40]!r} is neither a number of bytes nor max"


def page_bytes(size: str) -> int:
    """`2MB` -> bytes (binary units, as kubelet and the kernel write them); the text was checked by `faults`."""
    match = _PAGE_SIZE.fullmatch(size)
    if match is None:
        raise InvalidRequest(f"{size[:40]!r} is not a page size like 2MB or 1GB")
    return int(match[1]) << _PAGE_UNITS[match[2]]


def hugepages(resources: Resources) -> tuple[int, int]:
    """(page size, bytes of such pages) that the container may use; (0, 0) for none."""
    used = [(page_bytes(size), limit) for size, limit in resources.hugepage_limits.items() if limit > 0]
    return used[0] if used else (0, 0)


# --- the VM ----------------------------------------------------------------------------------------------------------


def size_for(options: VmOptions, resources: Resources, node: NodeLimits, *, pins_memory: bool = False) -> VmSize:
    """What the VM boots with and can grow to. Raises InvalidRequest for a size that this node or a guest cannot have.
    `pins_memory`: whether a host device pins all memory, also what a balloon would hold back."""
    vcpus = vcpus_for(options, resources, node)
    memory = memory_for(resources, node)
    page, _ = hugepages(resources)
    # A topology lists all vCPUs that there ever are, and its author does not know the node's settings.
    room_vcpus = 0 if options.hardware.topology else node.room_vcpus
    max_vcpus = options.max_vcpus if options.max_vcpus is not None else room_vcpus
    if max_vcpus > node.max_vcpus:
        raise InvalidRequest(
            f"annotation virtshim.io/max-vcpus asks for {max_vcpus}; this node allows {node.max_vcpus} (vm.max_vcpus)"
        )
    _refuse_more_than_all(options.max_memory_bytes, "annotation virtshim.io/max-memory", node)
    max_memory = options.max_memory_bytes or min(node.room_memory, node.memory or node.room_memory)
    if (page or pins_memory) and options.max_memory_bytes > memory:
        why = "memory of huge pages" if page else "the memory of a virtual machine with host devices"
        raise InvalidRequest(f"annotation virtshim.io/max-memory: {why} cannot grow; remove one of the two")
    return VmSize(
        vcpus=vcpus,
        max_vcpus=vcpus if options.vcpus is not None else max(vcpus, max_vcpus),
        memory_bytes=memory,
        max_memory_bytes=memory if page or pins_memory else max(memory, max_memory),
        page_bytes=page,
    )


def memory_for(resources: Resources, node: NodeLimits) -> int:
    """Guest memory in bytes, see `sized_by`. A limit below the node's minimum is refused, a request is raised to it."""
    wanted, source = _memory_asked(resources)
    if source == DEFAULT_MEMORY:
        return node.default_memory
    if source == MEMORY_REQUEST:
        wanted = max(wanted, node.min_memory)
    if wanted < node.min_memory:
        raise InvalidRequest(
            f"{source} is {wanted} bytes, but a virtual machine needs at least {node.min_memory} "
            "(vm.min_memory in the node's configuration)"
        )
    if wanted > _MAX_MEMORY:
        raise InvalidRequest(f"{source} is {wanted} bytes, but a virtual machine can have at most {_MAX_MEMORY}")
    _refuse_more_than_all(wanted, source, node)
    return wanted


def _refuse_more_than_all(wanted: int, source: str, node: NodeLimits) -> None:
    """The kernel gives no process more memory than the node has."""
    if node.memory and wanted > node.memory:
        raise InvalidRequest(
            f"{source} is {wanted} bytes, but this node has {node.memory} bytes of RAM and swap; ask for less, or choose a "
            "larger node"
        )


def vcpus_for(options: VmOptions, resources: Resources, node: NodeLimits) -> int:
    """vCPUs, see `sized_by`. Raises InvalidRequest for more than the node allows. A request is cut, because it is not a
    limit."""
    wanted, source = _vcpus_asked(options, resources)
    if source == CPU_REQUEST:
        return min(wanted, node.max_vcpus)
    if wanted > node.max_vcpus:
        raise InvalidRequest(f"{source} asks for {wanted} vCPUs; this node allows {node.max_vcpus} (vm.max_vcpus)")
    return wanted


def sized_by(options: VmOptions, resources: Resources) -> tuple[str, str]:
    """Which fields decide the number of vCPUs and the guest's memory, for people."""
    return _vcpus_asked(options, resources)[1], _memory_asked(resources)[1]


def _vcpus_asked(options: VmOptions, resources: Resources) -> tuple[int, str]:
    """The number of vCPUs and its source: the annotation; otherwise the CPU limit rounded up; otherwise the container's
    exclusive CPUs; otherwise its CPU request, which CRI passes as shares, rounded up."""
    if options.vcpus is not None:
        return options.vcpus, "annotation VirtletVCPUCount"
    if resources.cpu_quota > 0:
        return -(-resources.cpu_quota // (resources.cpu_period or DEFAULT_PERIOD)), "resources.limits.cpu"
    if resources.cpu_quota < 0 and resources.cpuset_cpus:
        return len(numbers_in(resources.cpuset_cpus)), "resources.limits.cpu (exclusive CPUs)"
    if resources.cpu_shares > _LEAST_SHARES:
        return -(-resources.cpu_shares // _SHARES_OF_A_CPU), CPU_REQUEST
    return 1, "no limit and no request of CPU"


def _memory_asked(resources: Resources) -> tuple[int, str]:
    """The memory and its source: huge pages; otherwise the limit; otherwise the request. CRI has no field for the
    request; kubelet only passes it if its memory QoS protects it (`memory.min` or `memory.low`; "0" is none)."""
    if pages := hugepages(resources)[1]:
        return pages, "resources.limits.hugepages"
    if resources.memory_limit_bytes > 0:
        return resources.memory_limit_bytes, "resources.limits.memory"
    protected = [resources.unified.get(name, "") for name in ("memory.min", "memory.low")]
    if request := max(int(value) if _NUMBER.fullmatch(value) else 0 for value in protected):
        return request, MEMORY_REQUEST
    return 0, DEFAULT_MEMORY


def nic_queues(options: VmOptions, size: VmSize) -> int:
    """Queues of each NIC: one for each vCPU at the start, because a guest cannot use more."""
    if options.hardware.nic_model is not NicModel.VIRTIO:
        return 1
    return options.nic_queues or min(size.vcpus, MAX_NIC_QUEUES)


def may_want_queues(options: VmOptions, pod: Resources) -> bool:
    """Whether a VM of the pod may use several queues for each NIC, as known when its network is made. True if it is
    unknown what its containers may use."""
    if options.hardware.nic_model is not NicModel.VIRTIO:
        return False
    asked = options.nic_queues or options.vcpus
    if asked:
        return asked > 1
    if pod.cpu_shares > _SHARES_OF_A_CPU:  # a container may have this request and no limit
        return True
    if pod.cpu_quota > 0:
        return pod.cpu_quota > (pod.cpu_period or DEFAULT_PERIOD)
    return pod.cpu_quota < 0 or _has_no_quotas(pod)


def _has_no_quotas(resources: Resources) -> bool:
    """Whether kubelet sets no quotas at all (`cpuCFSQuota: false`): otherwise a container without a limit has a
    period."""
    return not resources.cpu_quota and not resources.cpu_period


def are_exclusive(resources: Resources) -> bool:
    """Whether the CPUs in its cpuset are exclusive, as far as a CRI server can tell. kubelet sets no quota for such a
    container, or, before 1.33, a quota for as many CPUs. Containers on the shared CPUs have neither, except by
    chance."""
    if not resources.cpuset_cpus:
        return False
    count = len(numbers_in(resources.cpuset_cpus))
    return resources.cpu_quota < 0 or resources.cpu_quota == count * (resources.cpu_period or DEFAULT_PERIOD)


def numbers_in(cpuset: str) -> frozenset[int]:
    """The numbers in a list like 0-3,7. `faults` has checked the text."""
    ends = [part.partition("-") for part in cpuset.split(",") if part]
    return frozenset(number for low, _, high in ends for number in range(int(low), int(high or low) + 1))


def limits_for(resources: Resources, overhead: Resources, size: VmSize, node: NodeLimits) -> CgroupLimits:
    """The VM's cgroup: the container's limits are the guest's, and the pod's overhead is added for QEMU."""
    extra = overhead_bytes(overhead, size, node)
    _, pages = hugepages(resources)
    # Huge pages are not charged as memory, so QEMU also gets what is left of the limit.
    memory = resources.memory_limit_bytes + extra if pages else size.memory_bytes + extra
    period = resources.cpu_period or DEFAULT_PERIOD
    quota = max(resources.cpu_quota, 0)
    if quota and overhead.cpu_quota > 0:
        quota += overhead.cpu_quota * period // (overhead.cpu_period or DEFAULT_PERIOD)
    swap = resources.memory_swap_limit_bytes - resources.memory_limit_bytes
    if resources.memory_swap_limit_bytes > 0 > swap:
        raise InvalidRequest("memory_swap_limit_in_bytes is less than memory_limit_in_bytes: it counts both together")
    return CgroupLimits(
        cpu_shares=resources.cpu_shares,
        cpu_quota=quota,
        cpu_period=period if quota else 0,
        cpuset_cpus=resources.cpuset_cpus,
        cpuset_mems=resources.cpuset_mems,
        memory=memory,
        swap=swap if resources.memory_swap_limit_bytes > 0 and resources.memory_limit_bytes > 0 else None,
        hugepages={page_bytes(name): limit for name, limit in resources.hugepage_limits.items() if limit > 0},
        unified={key: _with_overhead(key, value, extra, memory) for key, value in resources.unified.items()},
    )


def overhead_bytes(overhead: Resources, size: VmSize, node: NodeLimits) -> int:
    """Memory for QEMU itself."""
    return max(overhead.memory_limit_bytes or node.overhead, _needed(size))


def _needed(size: VmSize) -> int:
    """The memory in bytes that a VM takes besides its guest's. Huge pages need hardly any page tables."""
    return LEAST_OVERHEAD + (0 if size.page_bytes else size.memory_bytes // _GROWING_PART)


def overhead_missing(sandbox: Sandbox, resources: Resources, size: VmSize) -> int:
    """By how many bytes its pod's cgroup, with limit and overhead, is too small for the VM; 0 if it fits, or is not
    limited."""
    if (
        not is_pods_own(sandbox.config.cgroup_parent)
        or sandbox.config.vms_lie_beside
        or not resources.memory_limit_bytes
    ):
        return 0
    # Huge pages are not charged as memory.
    room = sandbox.overhead.memory_limit_bytes + (resources.memory_limit_bytes if size.page_bytes else 0)
    return max(_needed(size) - room, 0)


def refuse_little_overhead(sandbox: Sandbox, resources: Resources, size: VmSize, *, missing: int = 0) -> None:
    """Raises InvalidRequest for a VM that the kernel would kill once its guest has filled its memory. `missing`: by how
    much its cgroup was too small before."""
    if (lacks := overhead_missing(sandbox, resources, size)) > missing:
        has = sandbox.overhead.memory_limit_bytes
        raise InvalidRequest(
            f"the pod's memory overhead is {_mib(has)}Mi, but a virtual machine of {_mib(size.memory_bytes)}Mi needs "
            f"{_mib(has + lacks)}Mi or more: otherwise the kernel kills the machine when its guest has filled its memory; use a "
            "RuntimeClass with such an overhead.podFixed.memory (/etc/virtshim/runtimeclass.yaml has three), or lower "
            "resources.limits.memory"
        )


def _mib(count: int) -> int:
    return -(-count // _MIB)


def _with_overhead(key: str, value: str, extra: int, memory: int) -> str:
    """The value of a cgroup v2 file for the VM. kubelet computes a `memory.high` between request and limit. A guest
    uses all its memory after a while, so that value would slow it down; the limit replaces it. QEMU's share is added to
    protected amounts."""
    if key not in ("memory.min", "memory.low", "memory.high") or value in ("max", "0"):
        return value
    return str(memory if key == "memory.high" else min(int(value) + extra, memory))


# --- changes ---------------------------------------------------------------------------------------------------------


def changes_in(update: Resources) -> Resources:
    """The change that kubelet means with an update. kubelet reads the pod's limits from its cgroup, where -1 or a very
    large number means none, and subtracts the overhead. It ignores huge pages, so each of their limits is 0."""

    return dataclasses.replace(
        update,
        cpu_quota=update.cpu_quota if update.cpu_quota >= -1 else 0,
        memory_limit_bytes=update.memory_limit_bytes if 0 < update.memory_limit_bytes <= _MAX_MEMORY else 0,
        hugepage_limits={size: pages for size, pages in update.hugepage_limits.items() if pages},
    )


def merged(old: Resources, new: Resources) -> Resources:
    """`new` laid over `old`: 0, "" and empty maps leave a value alone, because the CPU manager only sends cpusets.
    Quota -1 removes the limit."""
    changes = {
        field.name: getattr(new, field.name) for field in dataclasses.fields(Resources) if getattr(new, field.name)
    }
    for name in ("hugepage_limits", "unified"):
        if name in changes:
            changes[name] = {**getattr(old, name), **changes[name]}
    return dataclasses.replace(old, **changes)


def resized(size: VmSize, options: VmOptions, resources: Resources, node: NodeLimits) -> VmSize:
    """The new size of a VM that booted with `size`. vCPUs are never removed: the quota limits them, and few guests
    release one. Raises WrongState for what needs a restart, InvalidRequest for what is never possible."""
    page, pages = hugepages(resources)
    if (page, pages if page else 0) != (size.page_bytes, size.memory_bytes if size.page_bytes else 0):
        raise WrongState("memory of huge pages cannot change while the virtual machine exists; restart the pod")
    vcpus = max(_grown_vcpus(size, options, resources, node), size.vcpus)
    if vcpus > size.max_vcpus:
        raise WrongState(
            f"resources.limits.cpu asks for {vcpus} vCPUs, but the machine can have {size.max_vcpus} without a restart; "
            "annotate the pod with virtshim.io/max-vcpus, or set vm.room_vcpus on the node, and recreate it"
        )
    memory = size.memory_bytes if page else _changed_memory(size, resources, node)
    if memory > size.max_memory_bytes:
        raise WrongState(
            f"resources.limits.memory asks for {memory} bytes, but the machine can have {size.max_memory_bytes} without a "
            "restart; annotate the pod with virtshim.io/max-memory, or set vm.room_memory on the node, and recreate it"
        )
    return dataclasses.replace(size, vcpus=vcpus, memory_bytes=memory)


def _changed_memory(size: VmSize, resources: Resources, node: NodeLimits) -> int:
    """A changed request adds as much as there is room for, and removes nothing."""
    source = _memory_asked(resources)[1]
    if source == DEFAULT_MEMORY:
        return size.memory_bytes
    wanted = memory_for(resources, node)
    return max(size.memory_bytes, min(wanted, size.max_memory_bytes)) if source == MEMORY_REQUEST else wanted


def _grown_vcpus(size: VmSize, options: VmOptions, resources: Resources, node: NodeLimits) -> int:
    """Removing a limit asks for no particular number, because a cpuset may name all CPUs that others leave. A changed
    request adds as many as there is room for."""
    if resources.cpu_quota < 0:
        return size.vcpus
    wanted = vcpus_for(options, resources, node)
    return min(wanted, size.max_vcpus) if sized_by(options, resources)[0] == CPU_REQUEST else wanted


def cgroup_of(
    container: Container, sandbox: Sandbox, resources: Resources, size: VmSize, sizes: NodeLimits
) -> VmCgroup:
    """The container's cgroup with these resources."""
    limits = limits_for(resources, sandbox.overhead, size, sizes)
    spec = container.spec
    return VmCgroup(sandbox.id, container.id, spec.cgroup_parent, limits, resources.oom_score_adj, spec.uid)


# A guest's NUMA nodes mirror the host nodes of its exclusive CPUs. Pure.
#
# A guest that does not know them puts threads on one node and their memory on another. Shared CPUs may change at any
# time, so virtshim tells the guest nothing about them.

# The CPUs of each node of the host that has memory.
HostNodes = Mapping[int, frozenset[int]]

# Unless its memory is huge pages, a cell is a multiple of this size, so that the kernel can use transparent huge pages.
_UNIT = 2 << 20


def cells_for(resources: Resources, size: VmSize, nodes: Callable[[], HostNodes]) -> tuple[NumaCell, ...]:
    """The guest's NUMA nodes: vCPUs, memory and room to grow, in proportion to the CPUs on each node of the host. ()
    if all CPUs are on one node, if memory must come from other nodes, or if a node would have less than a vCPU or a
    page."""
    if not are_exclusive(resources):
        return ()
    cpus, mems = numbers_in(resources.cpuset_cpus), numbers_in(resources.cpuset_mems)
    places = {node: own & cpus for node, own in sorted(nodes().items()) if own & cpus}
    if len(places) < 2 or frozenset().union(*places.values()) != cpus or (mems and mems != frozenset(places)):
        return ()
    weights = [len(own) for own in places.values()]
    first = _split(size.vcpus, weights)
    later = _split(max(size.max_vcpus - size.vcpus, 0), weights)
    unit = size.page_bytes or _UNIT
    pages, rest = divmod(max(size.memory_bytes, size.max_memory_bytes), unit)
    memory = [part * unit for part in _split(pages, weights)]
    if 0 in first or 0 in memory:
        return ()
    memory[0] += rest
    numbered = zip(_numbered(first, 0), _numbered(later, size.vcpus), strict=True)
    return tuple(
        NumaCell(node, own, (*now, *to_come), part)
        for (node, own), (now, to_come), part in zip(places.items(), numbered, memory, strict=True)
    )


def topology_of(cells: Sequence[NumaCell]) -> Topology | None:
    """A topology without a socket on two nodes, as a kernel expects: the cores of a socket divide each row of vCPUs.
    None without cells."""
    rows = [length for cell in cells for length in _rows(cell.vcpus)]
    if not rows:
        return None
    cores = math.gcd(*rows)
    return Topology(sum(rows) // cores, cores, 1)


def _split(whole: int, weights: Sequence[int]) -> list[int]:
    """By largest remainder; of equal ones the first gets more."""
    total = sum(weights)
    parts = [whole * weight // total for weight in weights]
    by_rest = sorted(range(len(weights)), key=lambda index: -(whole * weights[index] % total))
    for index in by_rest[: whole - sum(parts)]:
        parts[index] += 1
    return parts


def _numbered(counts: Iterable[int], start: int) -> list[range]:
    found = []
    for count in counts:
        found.append(range(start, start + count))
        start += count
    return found


def _rows(numbers: Sequence[int]) -> list[int]:
    """The lengths of rows without a gap."""
    starts = [at for at, number in enumerate(numbers) if at == 0 or numbers[at - 1] != number - 1]
    return [end - start for start, end in zip(starts, [*starts[1:], len(numbers)], strict=True)]


@dataclass(frozen=True, slots=True)
class NodeHardware:
    # What the node provides for a VM, read for each new VM, because packages and CPUs change. The versioned machine
    # type, "" while unknown.
    machine_type: Callable[[], str]
    # None if libvirt chooses it at each start.
    firmware_of: Callable[[Firmware], FirmwareFiles | None]
    host_nodes: Callable[[], HostNodes]
    # Bytes that programs can still get without swapping.
    available_memory: Callable[[], int]
