"""The fake, and the client of a real tapmanager with the kernel's cgroups, fulfil the contract of VmCgroups."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.cgroups import FakeVmCgroups
from tap_node import TapNode, for_a_test, private_node

from tapmanager.cgroups import tree as cgroups
from tapmanager.cgroups.plan import RequestedLimits
from virtshim.model.cgroup import CgroupLimits, VmCgroup, vm_cgroup_path
from virtshim.model.errors import InvalidRequest, NotFound, Unavailable, WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.pods.cgroups import VmCgroupClient
from virtshim.pods.ports import VmCgroups
from virtshim.pods.tapmanager_connection import TapmanagerConnection

SANDBOX = SandboxId("5" * 64)
A = ContainerId("a" * 64)
B = ContainerId("b" * 64)
MIB = 1 << 20
SECONDS = 60.0
SMALL = CgroupLimits(cpu_quota=50_000, cpu_period=100_000, memory=256 * MIB)
LARGE = CgroupLimits(cpu_quota=80_000, cpu_period=100_000, memory=512 * MIB)


class World:
    """A sandbox with a network, below the pod's cgroup `parent`."""

    vm_cgroups: VmCgroups
    parent: str

    def group(self, limits: CgroupLimits = SMALL, container: ContainerId = A) -> VmCgroup:
        return VmCgroup(SANDBOX, container, self.parent, limits, 900)

    def exists(self, container: ContainerId = A) -> bool:
        raise NotImplementedError

    def limits(self) -> tuple[int, int]:
        """The limits of A's cgroup: quota in microseconds, memory in bytes."""
        raise NotImplementedError

    def impossible(self) -> VmCgroup:
        """Limits whose `cpuset_cpus` the kernel refuses."""
        return self.group(CgroupLimits(cpu_quota=90_000, cpu_period=100_000, memory=1 << 30, cpuset_cpus="4095"))

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Puts a VM into A's cgroup."""
        raise NotImplementedError

    def is_network_open(self) -> bool:
        """Whether the sandbox's next VM may get its network."""
        raise NotImplementedError

    def end_tapmanager(self) -> None:
        raise NotImplementedError


class InMemory(World):
    parent = "/pod"

    def __init__(self) -> None:
        self.vm_cgroups = self._fake = FakeVmCgroups()

    def exists(self, container: ContainerId = A) -> bool:
        return vm_cgroup_path(self.parent, container) in self._fake.cgroups

    def limits(self) -> tuple[int, int]:
        limits = self._fake.group(A).limits
        return limits.cpu_quota, limits.memory

    def impossible(self) -> VmCgroup:
        self._fake.refuses = "cpuset_cpus: no such CPU"
        return super().impossible()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._fake.running.add(A)
        yield
        self._fake.running.remove(A)

    def is_network_open(self) -> bool:
        return SANDBOX in self._fake.armed

    def end_tapmanager(self) -> None:
        self._fake.gone = True


@pytest.fixture
def in_memory() -> World:
    return InMemory()


class OnThisMachine(World):
    def __init__(self, node: TapNode, parent: str) -> None:
        self.node = node
        self.parent = parent
        self.vm_cgroups = VmCgroupClient(TapmanagerConnection(node.socket), own=True)

    def exists(self, container: ContainerId = A) -> bool:
        return bool(self._places(container))

    def _places(self, container: ContainerId) -> list[Path]:
        path = vm_cgroup_path(self.parent, container)
        return [Path(one.root + path) for one in cgroups.hierarchies() if Path(one.root + path).is_dir()]

    def limits(self) -> tuple[int, int]:
        quota = self.value("cpu", "cpu.cfs_quota_us", "cpu.max")
        return quota, self.value("memory", "memory.limit_in_bytes", "memory.max")

    def value(self, controller: str, v1: str, v2: str) -> int:
        home = next(one for one in cgroups.hierarchies() if controller in one.controllers)
        path = vm_cgroup_path(self.parent, A)
        return int(Path(f"{home.root}{path}/{v2 if home.is_v2 else v1}").read_text().split()[0])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        qemu = subprocess.Popen(["sleep", "60"])
        try:
            for place in self._places(A):
                (place / "cgroup.procs").write_text(str(qemu.pid))
            yield
        finally:
            qemu.kill()
            qemu.wait()

    def is_network_open(self) -> bool:
        path = self.node.placement(SANDBOX)
        return path.exists() and json.loads(path.read_text())["open_until"] > 0

    def end_tapmanager(self) -> None:
        self.node.stop()


@pytest.fixture(scope="module", autouse=True)
def running_node() -> Iterator[TapNode | None]:
    """The node exists before the leak check takes its snapshot."""
    if os.geteuid() != 0:
        yield None
        return
    with private_node() as node:
        node.start()
        yield node


@pytest.fixture
def on_this_machine(running_node: TapNode, pod_cgroup: str) -> Iterator[World]:
    with for_a_test(running_node) as node:
        node.attach(SANDBOX.value)
        world = OnThisMachine(node, pod_cgroup)
        yield world
        if not node.runs():
            node.start()
        for container in (A, B):
            world.vm_cgroups.remove(container, pod_cgroup, SECONDS)
        node.release(SANDBOX.value)


@pytest.fixture(params=["in_memory", pytest.param("on_this_machine", marks=pytest.mark.network)])
def world(request: pytest.FixtureRequest) -> World:
    made: World = request.getfixturevalue(request.param)
    return made


def test_a_cgroup_is_created_with_its_limits(world: World) -> None:
    world.vm_cgroups.make(world.group(), SECONDS)
    assert world.limits() == (50_000, 256 * MIB)
    assert not world.exists(B)


@pytest.mark.network
def test_a_cgroup_without_a_record_is_removed_with_its_sandboxs_network(on_this_machine: OnThisMachine) -> None:
    """kubelet removes the cgroup with the pod's own one, but only if it lies below that."""
    on_this_machine.vm_cgroups.make(on_this_machine.group(), SECONDS)
    on_this_machine.node.release(SANDBOX.value)
    assert not on_this_machine.exists()


@pytest.mark.network
def test_a_cgroup_with_a_vm_stays_when_its_network_is_removed(on_this_machine: OnThisMachine) -> None:
    on_this_machine.vm_cgroups.make(on_this_machine.group(), SECONDS)
    with on_this_machine.running():
        on_this_machine.node.release(SANDBOX.value)
        assert on_this_machine.exists()


def test_the_network_is_open_to_the_next_vm_until_its_start_fails(world: World) -> None:
    assert not world.is_network_open()
    world.vm_cgroups.make(world.group(), SECONDS)
    assert world.is_network_open()
    for _ in range(2):
        world.vm_cgroups.start_failed(SANDBOX, SECONDS)
        assert not world.is_network_open()
    world.vm_cgroups.start_failed(SandboxId("6" * 64), SECONDS)


def test_creating_a_cgroup_again_updates_its_limits(world: World) -> None:
    world.vm_cgroups.make(world.group(), SECONDS)
    world.vm_cgroups.make(world.group(LARGE), SECONDS)
    assert world.limits() == (80_000, 512 * MIB)


def test_limits_of_an_existing_cgroup_change(world: World) -> None:
    world.vm_cgroups.make(world.group(), SECONDS)
    world.vm_cgroups.limit(world.group(LARGE), SECONDS)
    assert world.limits() == (80_000, 512 * MIB)


def test_limits_of_a_missing_cgroup_are_not_set(world: World) -> None:
    with pytest.raises(NotFound):
        world.vm_cgroups.limit(world.group(), SECONDS)
    assert not world.exists()


def test_a_limit_that_the_kernel_refuses_is_named_and_no_other_limit_changes(world: World) -> None:
    world.vm_cgroups.make(world.group(), SECONDS)
    with pytest.raises(InvalidRequest, match="cpuset_cpus"):
        world.vm_cgroups.limit(world.impossible(), SECONDS)
    assert world.limits() == (50_000, 256 * MIB)


def test_a_cgroup_whose_limits_were_refused_can_be_removed(world: World) -> None:
    with pytest.raises(InvalidRequest, match="cpuset_cpus"):
        world.vm_cgroups.make(world.impossible(), SECONDS)
    world.vm_cgroups.remove(A, world.parent, SECONDS)
    assert not world.exists()


def test_a_cgroup_may_be_removed_twice(world: World) -> None:
    for container in (A, B):
        world.vm_cgroups.make(world.group(container=container), SECONDS)
    for _ in range(2):
        world.vm_cgroups.remove(A, world.parent, SECONDS)
        assert not world.exists()
    assert world.exists(B)


def test_a_cgroup_with_a_vm_in_it_is_not_removed(world: World) -> None:
    world.vm_cgroups.make(world.group(), SECONDS)
    with world.running(), pytest.raises(WrongState):
        world.vm_cgroups.remove(A, world.parent, SECONDS)
    assert world.exists()


def test_new_and_removed_cgroups_have_no_oom_kills(world: World) -> None:
    world.vm_cgroups.make(world.group(), SECONDS)
    assert world.vm_cgroups.oom_kills(A, world.parent) == 0
    world.vm_cgroups.remove(A, world.parent, SECONDS)
    assert world.vm_cgroups.oom_kills(A, world.parent) == 0


ASKED: dict[str, Callable[[World], object]] = {
    "make": lambda world: world.vm_cgroups.make(world.group(), SECONDS),
    "limit": lambda world: world.vm_cgroups.limit(world.group(), SECONDS),
    "start_failed": lambda world: world.vm_cgroups.start_failed(SANDBOX, SECONDS),
    "remove": lambda world: world.vm_cgroups.remove(A, world.parent, SECONDS),
}


def test_without_tapmanager_only_oom_kills_can_be_read(world: World) -> None:
    world.end_tapmanager()
    for ask in ASKED.values():
        with pytest.raises(Unavailable):
            ask(world)
    assert world.vm_cgroups.oom_kills(A, world.parent) == 0


@pytest.mark.network
def test_a_vm_has_its_huge_page_limit_without_a_pod_cgroup() -> None:
    """The hugetlb controller may be in a hierarchy of its own."""
    found = cgroups.hierarchies()
    if not any("hugetlb" in one.controllers for one in found):
        pytest.skip("NOT TO BE HAD HERE: no cgroup controller hugetlb on this machine")
    path = f"/virtshim/virtshim-{A}"
    groups = cgroups.VmCgroups(found)
    assert groups.make(path, RequestedLimits(hugepages={2 << 20: 64 * MIB}))
    try:
        names = ("hugetlb.2MB.max", "hugetlb.2MB.limit_in_bytes")
        limits = [Path(one.root + path, name) for one in found for name in names]
        assert [int(limit.read_text()) for limit in limits if limit.exists()] == [64 * MIB]
    finally:
        groups.remove(path)
    assert [one.root for one in found if Path(one.root + path).exists()] == []


@pytest.mark.network
def test_a_vm_may_have_only_as_many_threads_as_a_qemu_needs(on_this_machine: OnThisMachine) -> None:
    on_this_machine.vm_cgroups.make(on_this_machine.group(), SECONDS)
    assert on_this_machine.value("pids", "pids.max", "pids.max") == 1024
