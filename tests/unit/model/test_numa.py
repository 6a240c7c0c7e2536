"""A guest sees NUMA nodes according to the exclusive CPUs of its container."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.model.container import Resources
from virtshim.model.hardware import Topology
from virtshim.model.sizing import cells_for, topology_of
from virtshim.model.vm import NumaCell, VmSize

MIB, GIB = 1 << 20, 1 << 30
# Kernels number hyperthreads in this way: CPUs 0 to 3 and 8 to 11 are on node 0.
NODES = {0: frozenset({0, 1, 2, 3, 8, 9, 10, 11}), 1: frozenset({4, 5, 6, 7, 12, 13, 14, 15})}
SPANNING = Resources(cpu_quota=-1, cpuset_cpus="2-5", cpuset_mems="0-1")
FOUR = VmSize(vcpus=4, memory_bytes=GIB)


def cells(resources: Resources = SPANNING, size: VmSize = FOUR) -> Sequence[NumaCell]:
    return cells_for(resources, size, lambda: NODES)


def test_a_guest_on_two_nodes_has_vcpus_and_memory_as_its_cpus_are_spread() -> None:
    assert cells() == (
        NumaCell(0, frozenset({2, 3}), (0, 1), GIB // 2),
        NumaCell(1, frozenset({4, 5}), (2, 3), GIB // 2),
    )


def test_a_node_with_more_of_its_cpus_has_more_of_its_vcpus_and_memory() -> None:
    found = cells(dataclasses.replace(SPANNING, cpuset_cpus="1-4"))
    assert [(cell.vcpus, cell.memory_bytes) for cell in found] == [((0, 1, 2), 768 * MIB), ((3,), 256 * MIB)]


def test_hotpluggable_vcpus_are_spread_and_initial_ones_are_on_all_nodes() -> None:
    found = cells(size=VmSize(vcpus=4, max_vcpus=8, memory_bytes=GIB, max_memory_bytes=2 * GIB))
    assert [cell.vcpus for cell in found] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert [cell.memory_bytes for cell in found] == [GIB, GIB]


@pytest.mark.parametrize(
    "resources",
    [
        pytest.param(dataclasses.replace(SPANNING, cpu_quota=400_000), id="a quota for as many: kubelet before 1.33"),
        pytest.param(dataclasses.replace(SPANNING, cpu_quota=40_000, cpu_period=10_000), id="of another period"),
        pytest.param(dataclasses.replace(SPANNING, cpuset_mems=""), id="no memory manager"),
    ],
)
def test_every_way_in_which_kubelet_gives_exclusive_cpus_works(resources: Resources) -> None:
    assert len(cells(resources)) == 2


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        pytest.param({"cpuset_cpus": "0-3"}, FOUR, id="one node"),
        pytest.param({"cpuset_cpus": "0-1,8-9"}, FOUR, id="one node's hyperthreads"),
        pytest.param({"cpuset_cpus": ""}, FOUR, id="no CPUs of its own"),
        pytest.param({"cpu_quota": 200_000}, FOUR, id="CPUs that others have, too"),
        pytest.param({"cpu_quota": 0}, FOUR, id="CPUs without a word of a limit"),
        pytest.param({"cpuset_cpus": "2-5,99"}, FOUR, id="a CPU that is on no node with memory"),
        pytest.param({"cpuset_mems": "0"}, FOUR, id="memory on one node"),
        pytest.param({}, dataclasses.replace(FOUR, vcpus=1), id="less than a vCPU for each"),
        pytest.param({}, dataclasses.replace(FOUR, page_bytes=GIB), id="less than a page for each"),
    ],
)
def test_a_guest_sees_one_numa_node_in_all_other_cases(changes: dict[str, object], size: VmSize) -> None:
    assert cells(dataclasses.replace(SPANNING, **changes), size) == ()


def test_memory_is_split_at_whole_pages() -> None:
    huge = cells(size=dataclasses.replace(FOUR, memory_bytes=3 * GIB, page_bytes=GIB))
    assert [cell.memory_bytes for cell in huge] == [2 * GIB, GIB]
    odd = cells(size=dataclasses.replace(FOUR, memory_bytes=GIB + 3 * MIB))
    assert [cell.memory_bytes for cell in odd] == [GIB // 2 + 3 * MIB, GIB // 2]


@given(
    spread=st.lists(st.integers(1, 8), min_size=2, max_size=5),
    vcpus=st.integers(1, 40),
    room=st.integers(0, 40),
    memory=st.integers(64 * MIB, 64 * GIB),
)
def test_each_vcpu_and_each_byte_is_in_one_cell(spread: list[int], vcpus: int, room: int, memory: int) -> None:
    nodes = {number: frozenset(range(number * 8, number * 8 + own)) for number, own in enumerate(spread)}
    listed = ",".join(str(cpu) for own in nodes.values() for cpu in own)
    size = VmSize(vcpus=vcpus, max_vcpus=vcpus + room, memory_bytes=memory, max_memory_bytes=memory)
    found = cells_for(Resources(cpu_quota=-1, cpuset_cpus=listed), size, lambda: nodes)
    assert (found == ()) <= (vcpus < sum(spread))
    if found:
        assert sorted(vcpu for cell in found for vcpu in cell.vcpus) == list(range(vcpus + room))
        assert sum(cell.memory_bytes for cell in found) == memory
        topology = topology_of(found)
        assert topology is not None
        assert topology.count == vcpus + room
        node_of = {vcpu: cell.node for cell in found for vcpu in cell.vcpus}
        sockets = [
            {node_of[at + core] for core in range(topology.cores)} for at in range(0, vcpus + room, topology.cores)
        ]
        assert all(len(nodes_of_socket) == 1 for nodes_of_socket in sockets)


def test_no_socket_is_on_two_nodes() -> None:
    assert topology_of(cells()) == Topology(2, 2, 1)
    assert topology_of(cells(dataclasses.replace(SPANNING, cpuset_cpus="1-4"))) == Topology(4, 1, 1)
    assert topology_of(cells(size=VmSize(vcpus=4, max_vcpus=8, memory_bytes=GIB))) == Topology(4, 2, 1)
    assert topology_of(()) is None
