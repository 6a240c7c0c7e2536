"""What kubelet says about CPUs and memory, number by number, over the wire."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.cri import Client, served
from fakes.kubelet_requests import (
    Asked,
    container_linux,
    cpuset_linux,
    sandbox_linux,
    update_linux,
)
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim import machine
from virtshim.domain.ids import ContainerId
from virtshim.domain.vm import VmSize

pytestmark = pytest.mark.cri

MIB = 1 << 20
GIB = 1 << 30
ROOM = {"virtshim.io/max-vcpus": "4", "virtshim.io/max-memory": "2Gi"}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[World, Client]]:
    """One with eight CPUs and huge pages."""
    monkeypatch.setattr(machine, "cpus", lambda: 8)
    monkeypatch.setattr(machine, "free_hugepages", lambda _size: 4 * GIB)
    with served(tmp_path) as (world, client, _):
        world.pull()
        yield world, client


def running(client: Client, asked: Asked, annotations: dict[str, str] | None = None) -> tuple[str, str]:
    """Sandbox and container."""
    sandbox = client.run(linux=sandbox_linux(asked, "/kubepods/burstable/pod1"), annotations=annotations or {})
    made = client.create(sandbox, linux=pb.LinuxContainerConfig(resources=container_linux(asked)))
    client.start(made)
    return sandbox, made


def size(world: World, container: str) -> VmSize:
    return world.outside.vms.spec(world.domain(ContainerId(container))).size


# --- vCPUs


@pytest.mark.parametrize(
    ("asked", "vcpus"),
    [
        (Asked(cpu=8000, cpu_limit=8000, memory=GIB, memory_limit=GIB, exclusive="0-7"), 8),
        (Asked(cpu=4000, cpu_limit=4000, memory=GIB, memory_limit=GIB, exclusive="1-3,7"), 4),
        (Asked(cpu=1000, cpu_limit=1500), 2),
        (Asked(cpu=3000), 1),
        (Asked(), 1),
        (Asked(cpu=2500, cfs_quota=False), 3),
        (Asked(cpu=1000, cpu_limit=4000, cfs_quota=False), 1),
        (Asked(cpu_limit=4000, cfs_quota=False), 4),
        (Asked(cfs_quota=False), 1),
    ],
)
def test_vcpus_of_a_pod(node: tuple[World, Client], asked: Asked, vcpus: int) -> None:
    world, client = node
    _, container = running(client, asked)
    assert size(world, container).vcpus == vcpus


def test_cpus_that_others_leave_are_not_a_number_of_vcpus(node: tuple[World, Client]) -> None:
    """The static CPU manager gives containers without exclusive CPUs the list of all others."""
    world, client = node
    resources = container_linux(Asked(cpu=500))
    resources.cpuset_cpus = "2-7"
    container = client.create(client.run(), linux=pb.LinuxContainerConfig(resources=resources))
    client.start(container)
    assert size(world, container).vcpus == 1


@pytest.mark.parametrize(
    "asked", [Asked(cpu=500), Asked(cpu=2000, cpu_limit=2000, memory=GIB, memory_limit=GIB, exclusive="0-1")]
)
def test_the_cpu_manager_moves_a_vm_whatever_the_number_of_cpus(node: tuple[World, Client], asked: Asked) -> None:
    world, client = node
    _, container = running(client, asked)
    before = size(world, container)
    update = pb.UpdateContainerResourcesRequest(container_id=container, linux=cpuset_linux("0-7"))
    client.UpdateContainerResources(update)
    assert size(world, container) == before
    shown = client.status(container).resources.linux
    assert (shown.cpuset_cpus, shown.cpu_quota) == ("0-7", -1 if asked.exclusive else 0)


def test_shares_that_are_worth_more_vcpus_than_there_is_room_for_are_taken_all_the_same(
    node: tuple[World, Client],
) -> None:
    world, client = node
    before = Asked(cpu=1000, cfs_quota=False)
    _, container = running(client, before, ROOM)
    for cpu, vcpus in ((3000, 3), (7000, 4)):
        update = update_linux(dataclasses.replace(before, cpu=cpu))
        client.UpdateContainerResources(pb.UpdateContainerResourcesRequest(container_id=container, linux=update))
        assert size(world, container).vcpus == vcpus
        assert client.status(container).resources.linux.cpu_shares == cpu * 1024 // 1000
