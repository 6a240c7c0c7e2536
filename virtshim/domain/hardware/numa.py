"""A guest's NUMA nodes: those of the host that its exclusive CPUs are on. Pure.

A guest that does not know them puts threads on one node and their memory on another. CPUs that it shares with others may change
at any time, so nothing is said of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from virtshim.domain.container import Resources
from virtshim.domain.hardware.options import Topology
from virtshim.domain.sizing import are_exclusive, numbers_in
from virtshim.domain.vm import NumaCell, VmSize

# The CPUs of each node of the host that has memory.
HostNodes = Mapping[int, frozenset[int]]

# Cells of other memory than huge pages are of whole pages of that size, so that the kernel can give them such.
_UNIT = 2 << 20


def cells_for(resources: Resources, size: VmSize, nodes: Callable[[], HostNodes]) -> tuple[NumaCell, ...]:
    """vCPUs and memory as the CPUs are spread, and room for more of both likewise. () if they are all on one node; if the memory
    is to be on other nodes than they; if there is less than a vCPU or a page for each."""
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
    """One with no socket on two of them, as a kernel expects: as many cores a socket as go into each row of vCPUs. None without
    cells."""
    rows = [length for cell in cells for length in _rows(cell.vcpus)]
    if not rows:
        return None
    cores = math.gcd(*rows)
    return Topology(sum(rows) // cores, cores, 1)


def _split(whole: int, weights: Sequence[int]) -> list[int]:
    """By largest remainder; the first of those that are equal gets more."""
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
