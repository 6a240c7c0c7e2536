"""CPUs, the clock, NUMA nodes, and the limits of VMs whose cgroups libvirt manages. Pure.

NUMA needs no cgroup of libvirt's: QEMU binds each node's memory itself, and libvirt pins the vCPUs' threads.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from xml.etree.ElementTree import Element, SubElement

from virtshim.model.cgroup import CgroupLimits, libvirt_partition
from virtshim.model.errors import InvalidRequest
from virtshim.model.hardware import Clock, Topology
from virtshim.model.vm import CpuDetails, CpuModel, NumaCell
from virtshim.vm.elements.text import printable

# On q35, more need an IOMMU with interrupt remapping.
MAX_VCPUS = 255

# libvirt's bounds for `<quota>` and `<period>`.
_SMALLEST_QUOTA = 1000
_PERIODS = (1000, 1_000_000)
_DEFAULT_PERIOD = 100_000

# VIR_DOMAIN_MEMORY_PARAM_UNLIMITED, KiB.
_UNLIMITED = (2**63 - 1) >> 10


class DomainType(enum.Enum):
    """What runs the guest's instructions: KVM, QEMU's translator (TCG), or nothing (libvirt's test driver)."""

    KVM = "kvm"
    QEMU = "qemu"
    TEST = "test"

    @property
    def has_guest(self) -> bool:
        """Whether this runs a real guest, which could give memory back."""
        return self is not DomainType.TEST


class Cgroups(enum.Enum):
    """Which cgroups libvirt manages for a VM. OFF: none (`cgroup_controllers = [ ]`). libvirt then refuses all tuning, and
    the pod's own cgroup has the limits."""

    OFF = "off"
    V1 = "v1"
    V2 = "v2"


def vcpus(count: int, most: int, cpuset: str, cgroups: Cgroups) -> Element:
    """`count` at the start, up to `most` later. `cpuset` pins them if libvirt manages the cgroup; otherwise the VM's own cgroup
    does."""
    if not 1 <= count <= most <= MAX_VCPUS:
        raise InvalidRequest(f"{count} vCPUs of {most}: must be 1 to {MAX_VCPUS}")
    element = Element("vcpu", placement="static")
    if cpuset and cgroups is not Cgroups.OFF:
        element.set("cpuset", cpuset)
    if count < most:
        element.set("current", str(count))
    element.text = str(most)
    return element


def cpu_model(wanted: CpuModel, details: CpuDetails, domain_type: DomainType, topology: Topology) -> Element:
    """By default a guest gets every feature of the node: the host's CPU under KVM, otherwise everything that QEMU can translate
    (distributions refuse to run on QEMU's plain qemu64)."""
    if wanted is CpuModel.HOST_PASSTHROUGH and domain_type is DomainType.QEMU:
        raise InvalidRequest(
            "CPU model host-passthrough needs KVM, and this node runs VMs without it: choose host-model or none"
        )
    if wanted is CpuModel.HOST_MODEL:
        element = Element("cpu", mode="host-model", check="partial")
    elif wanted is CpuModel.CUSTOM:
        element = Element("cpu", mode="custom", match="exact", check="partial")
        named = SubElement(element, "model", fallback="allow" if details.fallback else "forbid")
        named.text = printable(details.name, "CPU model")
    elif wanted is CpuModel.MAXIMUM:
        element = Element("cpu", mode="maximum", check="none")
    elif domain_type is DomainType.KVM or wanted is CpuModel.HOST_PASSTHROUGH:
        element = Element("cpu", mode="host-passthrough", check="none", migratable="on")
    else:
        element = Element("cpu", mode="maximum", check="none")
    sockets, cores, threads = str(topology.sockets), str(topology.cores), str(topology.threads)
    SubElement(element, "topology", sockets=sockets, dies="1", cores=cores, threads=threads)
    for name, policy in details.features:
        SubElement(element, "feature", policy=policy, name=printable(name, "CPU feature"))
    return element


def guest_clock(counts_in: Clock, *, hyperv: bool) -> Element:
    """Leaves out the timers that cost the host time while the guest idles. Hyper-V's timer is one of its enlightenments."""
    element = Element("clock", offset=counts_in.value)
    SubElement(element, "timer", name="rtc", tickpolicy="catchup")
    SubElement(element, "timer", name="pit", tickpolicy="delay")
    SubElement(element, "timer", name="hpet", present="no")
    if hyperv:
        SubElement(element, "timer", name="hypervclock", present="yes")
    return element


def cpu_tuning(limits: CgroupLimits, cgroups: Cgroups) -> Element | None:
    """`<cputune>`; None if there is nothing to set. The limits are for the whole VM, including QEMU's own threads."""
    if cgroups is Cgroups.OFF:
        return None
    element = Element("cputune")
    for name, value in live_cpu(limits, cgroups).items():
        if value > 0:
            SubElement(element, _CPU_ELEMENTS[name]).text = str(value)
    return element if len(element) else None


_CPU_ELEMENTS = {"cpu_shares": "shares", "global_period": "global_period", "global_quota": "global_quota"}


def live_cpu(limits: CgroupLimits, cgroups: Cgroups) -> dict[str, int]:
    """libvirt's scheduler parameters; quota -1 removes a limit."""
    found = {}
    if limits.cpu_shares > 0:
        shares = min(max(limits.cpu_shares, 2), 262_144)
        # libvirt writes the number unchanged into cpu.weight. kubelet converts it this way, so VMs weigh as other pods do.
        found["cpu_shares"] = shares if cgroups is Cgroups.V1 else 1 + (shares - 2) * 9999 // 262_142
    if limits.cpu_quota > 0:
        found["global_period"] = min(max(limits.cpu_period or _DEFAULT_PERIOD, _PERIODS[0]), _PERIODS[1])
    found["global_quota"] = max(limits.cpu_quota, _SMALLEST_QUOTA) if limits.cpu_quota > 0 else -1
    return found


def memory_tuning(limits: CgroupLimits, cgroups: Cgroups) -> Element | None:
    """`<memtune>`; None if there is nothing to set."""
    if cgroups is Cgroups.OFF:
        return None
    element = Element("memtune")
    for name, kib in live_memory(limits, cgroups).items():
        if kib != _UNLIMITED:
            SubElement(element, name, unit="KiB").text = str(kib)
    return element if len(element) else None


def live_memory(limits: CgroupLimits, cgroups: Cgroups) -> dict[str, int]:
    """libvirt's memory parameters, in KiB. InvalidRequest for `unified` files that have no such parameter. `memory.oom.group` is
    ignored, because a VM is one process."""
    found = {"hard_limit": limits.memory >> 10 if limits.memory else _UNLIMITED}
    swap = limits.swap
    for key, value in limits.unified.items():
        if key == "memory.high" and cgroups is Cgroups.V2:
            found["soft_limit"] = _UNLIMITED if value == "max" else int(value) >> 10
        elif key == "memory.swap.max" and cgroups is Cgroups.V2:
            swap = None if value == "max" else int(value)
        elif key in ("memory.min", "memory.low") and value == "0":
            continue  # kubelet's memory QoS writes this for a pod without a request
        elif key != "memory.oom.group":
            raise InvalidRequest(
                f"unified[{key}] cannot be set below systemd's slices; set cgroup_controllers = [ ] in libvirt's qemu.conf, or "
                "memoryReservationPolicy: None in the kubelet configuration (before Kubernetes 1.36: turn MemoryQoS off)"
            )
    if swap is not None:  # v1 counts memory and swap together
        found["swap_hard_limit"] = (swap + (limits.memory if cgroups is Cgroups.V1 else 0)) >> 10
    return found


def numa_tuning(limits: CgroupLimits, cgroups: Cgroups) -> Element | None:
    """`<numatune>`; None if there is nothing to set."""
    if cgroups is Cgroups.OFF or not limits.cpuset_mems:
        return None
    element = Element("numatune")
    SubElement(element, "memory", mode="strict", nodeset=limits.cpuset_mems)
    return element


def cgroup_partition(cgroup_parent: str, cgroups: Cgroups) -> Element | None:
    """`<resource>` with the pod's slice; None for libvirt's own choice."""
    if cgroups is Cgroups.OFF or not (path := libvirt_partition(cgroup_parent)):
        return None
    element = Element("resource")
    SubElement(element, "partition").text = path
    return element


def numa_cells(wanted: Sequence[NumaCell], *, shared: bool) -> Element:
    """`<numa>`. `shared`: another process reads and writes the guest's memory."""
    element = Element("numa")
    for number, one in enumerate(wanted):
        memory = str(one.memory_bytes >> 10)
        cell = SubElement(element, "cell", id=str(number), cpus=listed(one.vcpus), memory=memory, unit="KiB")
        if shared:
            cell.set("memAccess", "shared")
    return element


def with_vcpu_pins(tuning: Element | None, wanted: Sequence[NumaCell]) -> Element | None:
    """`<cputune>` that pins each vCPU to the CPUs of its cell."""
    if not wanted:
        return tuning
    element = Element("cputune") if tuning is None else tuning
    pins = sorted((vcpu, listed(one.cpus)) for one in wanted for vcpu in one.vcpus)
    for at, (vcpu, cpus) in enumerate(pins):
        element.insert(at, Element("vcpupin", vcpu=str(vcpu), cpuset=cpus))
    return element


def with_memory_nodes(tuning: Element | None, wanted: Sequence[NumaCell]) -> Element | None:
    """`<numatune>` that prefers a host node for each cell's memory. It cannot require one: kubelet's memory manager only
    guarantees the sum over all nodes of a pod."""
    if not wanted:
        return tuning
    element = Element("numatune") if tuning is None else tuning
    for number, one in enumerate(wanted):
        SubElement(element, "memnode", cellid=str(number), mode="preferred", nodeset=str(one.node))
    return element


def listed(numbers: Collection[int]) -> str:
    """Writes a set as libvirt and the kernel do: 0-3,7."""
    words: list[str] = []
    start = last = -2
    for number in (*sorted(numbers), -2):
        if number == last + 1:
            last = number
            continue
        if start >= 0:
            words.append(str(start) if start == last else f"{start}-{last}")
        start = last = number
    return ",".join(words)
