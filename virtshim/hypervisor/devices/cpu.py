"""Number and model of the CPUs, the clock, and cgroup tuning. Pure."""

from __future__ import annotations

import enum

from lxml import etree

from virtshim.domain.errors import InvalidRequest
from virtshim.domain.vm import CpuLimits, CpuModel

# More need an IOMMU with interrupt remapping on q35.
MOST_VCPUS = 255

# Bounds that libvirt puts on `<quota>` and `<period>`.
_SMALLEST_QUOTA = 1000
_PERIODS = (1000, 1_000_000)
_DEFAULT_PERIOD = 100_000


class DomainType(enum.Enum):
    """Who runs the guest's instructions: KVM, QEMU's translator (TCG), or nobody (libvirt's test driver)."""

    KVM = "kvm"
    QEMU = "qemu"
    TEST = "test"


class Cgroups(enum.Enum):
    """Which cgroups libvirt manages for a VM. OFF: none (`cgroup_controllers = [ ]`): then it refuses all
    tuning, and the pod's own cgroup holds the limits."""

    OFF = "off"
    V1 = "v1"
    V2 = "v2"


def vcpus(count: int) -> etree._Element:
    if not 1 <= count <= MOST_VCPUS:
        raise InvalidRequest(f"{count} vCPUs: 1 to {MOST_VCPUS} wanted")
    element = etree.Element("vcpu", placement="static")
    element.text = str(count)
    return element


def model(wanted: CpuModel, domain_type: DomainType, count: int) -> etree._Element:
    """One socket with all cores: guests that limit sockets see them all. By default a guest gets all the node
    has: the host's own CPU under KVM, everything that QEMU can translate without it (distributions refuse to
    run on QEMU's plain qemu64)."""
    if wanted is CpuModel.HOST_PASSTHROUGH and domain_type is DomainType.QEMU:
        raise InvalidRequest(
            "CPU model host-passthrough needs KVM, and this node runs VMs without it: choose host-model or none"
        )
    if wanted is CpuModel.HOST_MODEL:
        element = etree.Element("cpu", mode="host-model", check="partial")
    elif domain_type is DomainType.KVM or wanted is CpuModel.HOST_PASSTHROUGH:
        element = etree.Element("cpu", mode="host-passthrough", check="none", migratable="on")
    else:
        element = etree.Element("cpu", mode="maximum", check="none")
    etree.SubElement(element, "topology", sockets="1", dies="1", cores=str(count), threads="1")
    return element


def clock() -> etree._Element:
    """UTC, and the timers that do not cost the host anything while the guest idles."""
    element = etree.Element("clock", offset="utc")
    etree.SubElement(element, "timer", name="rtc", tickpolicy="catchup")
    etree.SubElement(element, "timer", name="pit", tickpolicy="delay")
    etree.SubElement(element, "timer", name="hpet", present="no")
    return element


def tuning(limits: CpuLimits, count: int, cgroups: Cgroups) -> etree._Element | None:
    """CRI's limits for the container -> libvirt's for each vCPU; None if there is nothing to say."""
    element = etree.Element("cputune")
    if cgroups is Cgroups.OFF:
        return None
    if limits.shares > 0:
        shares = min(max(limits.shares, 2), 262_144)
        # libvirt writes the number into cpu.weight as it is; kubelet's own conversion keeps us in step with
        # other pods.
        value = shares if cgroups is Cgroups.V1 else 1 + (shares - 2) * 9999 // 262_142
        etree.SubElement(element, "shares").text = str(value)
    if limits.quota > 0:
        period = min(max(limits.period or _DEFAULT_PERIOD, _PERIODS[0]), _PERIODS[1])
        etree.SubElement(element, "period").text = str(period)
        etree.SubElement(element, "quota").text = str(max(limits.quota // count, _SMALLEST_QUOTA))
    return element if len(element) else None
