"""virtshim reads kubelet's numbers for CPUs and memory one by one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fakes.cri import Client, refused, served
from fakes.kubelet_requests import (
    NO_MEMORY_LIMIT_V1,
    NO_MEMORY_LIMIT_V2,
    Asked,
    container_linux,
    cpuset_linux,
    resize_steps,
    sandbox_linux,
    update_linux,
)
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.ids import ContainerId
from virtshim.model.vm import VmSize
from virtshim.system import machine

pytestmark = pytest.mark.cri

MIB = 1 << 20
GIB = 1 << 30
ROOM = {"virtshim.io/max-vcpus": "4", "virtshim.io/max-memory": "2Gi"}
OVERHEAD = {"overhead_cpu": 100, "overhead_memory": 256 * MIB}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[World, Client]]:
    """A node with eight CPUs and huge pages."""
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


def send(
    client: Client,
    steps: list[pb.UpdatePodSandboxResourcesRequest | pb.UpdateContainerResourcesRequest],
    sandbox: str,
    container: str,
) -> None:
    for step in steps:
        if isinstance(step, pb.UpdateContainerResourcesRequest):
            step.container_id = container
            client.UpdateContainerResources(step)
        else:
            step.pod_sandbox_id = sandbox
            client.UpdatePodSandboxResources(step)


# --- vCPUs


@pytest.mark.parametrize(
    ("asked", "vcpus"),
    [
        (Asked(cpu=8000, cpu_limit=8000, memory=GIB, memory_limit=GIB, exclusive="0-7"), 8),
        (Asked(cpu=4000, cpu_limit=4000, memory=GIB, memory_limit=GIB, exclusive="1-3,7"), 4),
        (Asked(cpu=1000, cpu_limit=1500), 2),
        (Asked(cpu=3000), 3),
        (Asked(cpu=100), 1),
        (Asked(cpu=100_000), 64),
        (Asked(), 1),
        (Asked(cpu=2500, cfs_quota=False), 3),
        (Asked(cpu=1000, cpu_limit=4000, cfs_quota=False), 1),
        (Asked(cpu_limit=4000, cfs_quota=False), 4),
        (Asked(cfs_quota=False), 1),
    ],
)
def test_a_pods_vcpus_follow_its_limit_or_else_its_request(
    node: tuple[World, Client], asked: Asked, vcpus: int
) -> None:
    world, client = node
    _, container = running(client, asked)
    assert size(world, container).vcpus == vcpus


@pytest.mark.parametrize(
    ("unified", "memory_limit", "memory", "by"),
    [
        ({"memory.min": str(2 * GIB)}, 0, 2 * GIB, "resources.requests.memory"),
        ({"memory.min": "0", "memory.low": str(512 * MIB)}, 0, 512 * MIB, "resources.requests.memory"),
        ({"memory.low": "1"}, 0, 32 * MIB, "resources.requests.memory"),
        ({"memory.min": str(GIB)}, 2 * GIB, 2 * GIB, "resources.limits.memory"),
        ({"memory.min": "0", "memory.low": "0"}, 0, GIB, "vm.default_memory: no limit, and no request that CRI shows"),
        ({}, 0, GIB, "vm.default_memory: no limit, and no request that CRI shows"),
    ],
)
def test_a_pods_memory_follows_its_limit_or_else_its_request(
    node: tuple[World, Client], unified: dict[str, str], memory_limit: int, memory: int, by: str
) -> None:
    """Without a limit, kubelet passes the request only as memory QoS protection, or not at all."""
    world, client = node
    resources = container_linux(Asked(memory_limit=memory_limit))
    resources.unified.update(unified)
    container = client.create(client.run(), linux=pb.LinuxContainerConfig(resources=resources))
    client.start(container)
    assert size(world, container).memory_bytes == memory
    status = client.ContainerStatus(pb.ContainerStatusRequest(container_id=container, verbose=True))
    assert json.loads(status.info["info"])["sizedBy"]["memory"] == by


@pytest.mark.parametrize(
    ("asked", "annotations", "by"),
    [
        (Asked(cpu=1000, cpu_limit=1500), {}, "resources.limits.cpu"),
        (Asked(cpu=3000), {}, "resources.requests.cpu"),
        (Asked(), {}, "no limit and no request of CPU"),
        (Asked(cpu_limit=1500), {"VirtletVCPUCount": "3"}, "annotation VirtletVCPUCount"),
    ],
)
def test_verbose_status_says_what_decided_the_number_of_vcpus(
    node: tuple[World, Client], asked: Asked, annotations: dict[str, str], by: str
) -> None:
    _, client = node
    _, container = running(client, asked, annotations)
    status = client.ContainerStatus(pb.ContainerStatusRequest(container_id=container, verbose=True))
    assert json.loads(status.info["info"])["sizedBy"]["vcpus"] == by


def test_a_larger_request_adds_vcpus_and_a_smaller_one_removes_none(
    node: tuple[World, Client],
) -> None:
    world, client = node
    _, container = running(client, Asked(cpu=1000), ROOM)
    for cpu, vcpus, memory in ((3000, 3, GIB), (7000, 4, 8 * GIB), (500, 4, 64 * MIB)):
        linux = update_linux(Asked(cpu=cpu))
        linux.unified["memory.min"] = str(memory)
        client.UpdateContainerResources(pb.UpdateContainerResourcesRequest(container_id=container, linux=linux))
        assert size(world, container).vcpus == vcpus
    assert size(world, container).memory_bytes == 2 * GIB


def test_a_cpuset_of_shared_cpus_does_not_decide_the_number_of_vcpus(node: tuple[World, Client]) -> None:
    """The static CPU manager gives containers without exclusive CPUs the list of all shared ones."""
    world, client = node
    resources = container_linux(Asked(cpu=500))
    resources.cpuset_cpus = "2-7"
    container = client.create(client.run(), linux=pb.LinuxContainerConfig(resources=resources))
    client.start(container)
    assert size(world, container).vcpus == 1


@pytest.mark.parametrize(
    "asked", [Asked(cpu=500), Asked(cpu=2000, cpu_limit=2000, memory=GIB, memory_limit=GIB, exclusive="0-1")]
)
def test_the_cpu_manager_can_move_a_vm_to_any_number_of_cpus(node: tuple[World, Client], asked: Asked) -> None:
    world, client = node
    _, container = running(client, asked)
    before = size(world, container)
    update = pb.UpdateContainerResourcesRequest(container_id=container, linux=cpuset_linux("0-7"))
    client.UpdateContainerResources(update)
    assert size(world, container) == before
    shown = client.status(container).resources.linux
    assert (shown.cpuset_cpus, shown.cpu_quota) == ("0-7", -1 if asked.exclusive else 0)


def test_cpu_shares_beyond_the_vcpu_maximum_are_accepted(
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


# --- resizes in place


RESIZES = {
    "guaranteed": (
        Asked(cpu=1000, cpu_limit=1000, memory=GIB, memory_limit=GIB),
        Asked(cpu=2000, cpu_limit=2000, memory=2 * GIB, memory_limit=2 * GIB),
    ),
    "burstable": (
        Asked(cpu=500, cpu_limit=1000, memory=512 * MIB, memory_limit=GIB),
        Asked(cpu=700, cpu_limit=3000, memory=GIB, memory_limit=2 * GIB),
    ),
    "cpu-limit-only": (Asked(cpu=500, cpu_limit=1000), Asked(cpu=600, cpu_limit=2000)),
    "memory-limit-only": (
        Asked(cpu=500, memory=512 * MIB, memory_limit=GIB),
        Asked(cpu=600, memory=GIB, memory_limit=2 * GIB),
    ),
    "requests-only": (Asked(cpu=500, memory=64 * MIB), Asked(cpu=900, memory=64 * MIB)),
    "limits-shrink": (
        Asked(cpu=900, cpu_limit=2000, memory=GIB, memory_limit=2 * GIB),
        Asked(cpu=500, cpu_limit=1000, memory=512 * MIB, memory_limit=GIB),
    ),
    "hugepages": (
        Asked(cpu=500, cpu_limit=1000, memory=GIB, memory_limit=GIB, hugepages={"2MB": GIB}),
        Asked(cpu=500, cpu_limit=2000, memory=GIB, memory_limit=GIB, hugepages={"2MB": GIB}),
    ),
}


_OF_A_RESIZE = ("resizing.", "cgroups.")


@pytest.mark.parametrize("none", [NO_MEMORY_LIMIT_V1, NO_MEMORY_LIMIT_V2], ids=["v1", "v2"])
@pytest.mark.parametrize("overhead", [{}, OVERHEAD], ids=["alone", "overhead"])
@pytest.mark.parametrize("kind", RESIZES)
def test_a_pod_resize_leaves_resources_without_limits_alone(
    node: tuple[World, Client], kind: str, overhead: dict[str, int], none: int
) -> None:
    world, client = node
    before, after = (dataclasses.replace(asked, **overhead) for asked in RESIZES[kind])
    sandbox, container = running(client, before, None if before.hugepages else {**ROOM})
    if before.hugepages:  # which have no room to grow: their CPUs grow within what they booted with
        after = dataclasses.replace(after, cpu_limit=before.cpu_limit // 2)
    world.outside.resizing.used = 64 * MIB
    booted = size(world, container)
    send(client, resize_steps(before, after, none), sandbox, container)

    shown = client.status(container).resources.linux
    wanted = update_linux(after)
    assert (shown.cpu_quota, shown.cpu_shares) == (wanted.cpu_quota, wanted.cpu_shares)
    assert shown.memory_limit_in_bytes == after.memory_limit
    assert {limit.page_size: limit.limit for limit in shown.hugepage_limits if limit.limit} == after.hugepages
    now = size(world, container)
    assert now.vcpus == max(booted.vcpus, -(-after.cpu_limit // 1000))
    assert now.memory_bytes == (after.memory_limit or booted.memory_bytes)
    # A repeat changes nothing.
    world.journal.calls.clear()
    client.UpdateContainerResources(pb.UpdateContainerResourcesRequest(container_id=container, linux=wanted))
    # The guest's set-up runs on its own thread and may still be logged.
    assert [call for call in world.journal.calls if call.startswith(_OF_A_RESIZE)] == []


def test_the_numbers_for_no_limit_are_those_that_kubelet_sends() -> None:
    asked = Asked(cpu=500, overhead_cpu=100, overhead_memory=256 * MIB)
    pods = [
        step.resources
        for step in resize_steps(asked, dataclasses.replace(asked, cpu=600))
        if isinstance(step, pb.UpdatePodSandboxResourcesRequest)
    ]
    assert {(one.cpu_quota, one.memory_limit_in_bytes) for one in pods} == {(-10_001, -1 - 256 * MIB)}


def test_a_pod_resize_that_its_vm_cannot_follow_is_refused(node: tuple[World, Client]) -> None:
    _, client = node
    before = Asked(cpu=500, cpu_limit=1000, **OVERHEAD)
    sandbox, container = running(client, before, ROOM)
    steps = resize_steps(before, dataclasses.replace(before, cpu_limit=5000))
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "virtshim.io/max-vcpus"):
        send(client, steps, sandbox, container)
    assert client.status(container).resources.linux.cpu_quota == 100_000
