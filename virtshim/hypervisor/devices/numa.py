"""A guest's NUMA nodes, and where their vCPUs and memory are on the host. Pure.

QEMU binds the memory of each itself, and libvirt pins the threads of vCPUs: neither needs a cgroup of libvirt's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lxml import etree

from virtshim.domain.vm import NumaCell


def cells(wanted: Sequence[NumaCell], *, shared: bool) -> etree._Element:
    """`<numa>`. `shared`: another process reads and writes the guest's memory."""
    element = etree.Element("numa")
    for number, one in enumerate(wanted):
        memory = str(one.memory_bytes >> 10)
        cell = etree.SubElement(element, "cell", id=str(number), cpus=listed(one.vcpus), memory=memory, unit="KiB")
        if shared:
            cell.set("memAccess", "shared")
    return element


def pinned(tuning: etree._Element | None, wanted: Sequence[NumaCell]) -> etree._Element | None:
    """`<cputune>` with a pin for each vCPU: to the CPUs of its cell, among which the host's scheduler may choose."""
    if not wanted:
        return tuning
    element = etree.Element("cputune") if tuning is None else tuning
    pins = sorted((vcpu, listed(one.cpus)) for one in wanted for vcpu in one.vcpus)
    for at, (vcpu, cpus) in enumerate(pins):
        element.insert(at, etree.Element("vcpupin", vcpu=str(vcpu), cpuset=cpus))
    return element


def bound(tuning: etree._Element | None, wanted: Sequence[NumaCell]) -> etree._Element | None:
    """`<numatune>` with the host's node of each cell, where its memory is as long as there is some. Nobody has made sure that
    each has as much to give: kubelet's memory manager counts what all nodes of a pod have together."""
    if not wanted:
        return tuning
    element = etree.Element("numatune") if tuning is None else tuning
    for number, one in enumerate(wanted):
        etree.SubElement(element, "memnode", cellid=str(number), mode="preferred", nodeset=str(one.node))
    return element


def listed(numbers: Collection[int]) -> str:
    """0-3,7, as libvirt and the kernel write sets."""
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
