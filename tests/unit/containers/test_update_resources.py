"""UpdateContainerResources and UpdatePodSandboxResources change everything or nothing, and remember it."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fakes.adopted import adopt
from fakes.journal import WAIT_LIMIT, Crash, When
from fakes.world import World, container_config, sandbox_config

from virtshim.model.container import ContainerPhase, Resources
from virtshim.model.errors import Aborted, InvalidRequest, NotFound, ShimError, WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.vm import VmSize, VmSpec

MIB = 1 << 20
GIB = 1 << 30
ROOM = {"virtshim.io/max-vcpus": "4", "virtshim.io/max-memory": "2Gi"}
START = Resources(cpu_shares=512, cpu_quota=100_000, cpu_period=100_000, memory_limit_bytes=GIB)
OVERHEAD = Resources(memory_limit_bytes=200 * MIB)


def vm(world: World, *, start: bool = True) -> tuple[SandboxId, ContainerId]:
    world.pull()
    config = sandbox_config(annotations=ROOM, cgroup_parent="/kubepods/pod1", overhead=OVERHEAD, resources=START)
    sandbox = world.run(config=config)
    container = world.create(sandbox, config=container_config(resources=START))
    if start:
        world.start(container)
    return sandbox, container


def resize(world: World, container: ContainerId, **changes: Any) -> None:
    world.do.update_container_resources.resize(world.container(container), Resources(**changes))


def spec(world: World, container: ContainerId) -> VmSpec:
    return world.outside.vms.spec(world.domain(container))


def picture(world: World, container: ContainerId) -> tuple[object, ...]:
    """Everything that a resize may change."""
    record = world.container(container)
    return record.resources, record.status.size, spec(world, container), dict(world.outside.cgroups.cgroups)


def test_a_started_vm_has_a_group_below_its_pods_with_overhead_on_top(world: World) -> None:
    _, container = vm(world)
    ((path, group),) = world.outside.cgroups.cgroups.items()
    assert path == f"/kubepods/pod1/virtshim-{container}"
    assert group.limits.memory == GIB + 200 * MIB
    assert (group.limits.cpu_quota, group.limits.cpu_shares) == (100_000, 512)


def beside(world: World, own: str = "/kubepods/burstable/pod1", name: str = "vm") -> tuple[SandboxId, ContainerId]:
    """A running VM of a pod without an overhead, below kubelet's cgroups."""
    world.pull()
    sandbox = world.run(config=sandbox_config(annotations=ROOM, cgroup_parent=own, resources=START))
    container = world.create(sandbox, name, config=container_config(resources=START))
    world.start(container)
    return sandbox, container


@pytest.mark.parametrize(
    ("own", "qos_class"),
    [
        ("/kubepods/pod1", "/kubepods"),
        ("/kubepods/burstable/pod1", "/kubepods/burstable"),
        (
            "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice",
            "/kubepods.slice/kubepods-besteffort.slice",
        ),
    ],
)
def test_without_an_overhead_a_vms_cgroup_is_beside_its_pods_with_the_nodes_overhead(
    world: World, own: str, qos_class: str
) -> None:
    sandbox, container = beside(world, own)
    ((path, group),) = world.outside.cgroups.cgroups.items()
    assert path == f"{qos_class}/virtshim-{container}"
    assert group.limits.memory == GIB + 256 * MIB
    assert spec(world, container).cgroup_parent == qos_class
    facts = world.do.node.sandbox_facts(world.sandbox(sandbox))
    assert facts["vmCgroupParent"] == qos_class
    assert "no RuntimeClass overhead" in str(facts["vmCgroupNote"])


def test_with_an_overhead_the_status_has_no_cgroup_note(world: World) -> None:
    sandbox, container = vm(world)
    assert world.do.node.sandbox_facts(world.sandbox(sandbox))["vmCgroupNote"] == ""
    assert world.do.node.container_facts(world.container(container))["cgroupParent"] == "/kubepods/pod1"


def test_a_cgroup_beside_the_pods_follows_a_resize_and_is_removed_with_the_vm(world: World) -> None:
    _, container = beside(world)
    resize(world, container, cpu_quota=250_000, memory_limit_bytes=2 * GIB)
    group = world.outside.cgroups.group(container)
    assert (group.limits.cpu_quota, group.limits.memory) == (250_000, 2 * GIB + 256 * MIB)
    world.outside.vms.crash(world.domain(container))
    after = world.recovered()
    assert after.outside.cgroups.cgroups == {}
    after.close()


def test_no_name_of_a_vm_beside_pods_cgroups_contains_pod(world: World) -> None:
    """kubelet takes a group with "pod" in its name for a pod's that is gone, and kills all that is in it; a systemd scope has
    the VM's name in its own."""
    _, container = beside(world, name="podinfo")
    assert "pod" not in spec(world, container).name
    assert container.value[:12] in spec(world, container).name


def test_elsewhere_a_vms_name_contains_its_containers_name(world: World) -> None:
    world.pull()
    container = world.create(world.run(), "podinfo")
    assert spec(world, container).name == f"virtshim-{container.value[:12]}-podinfo"


@pytest.mark.parametrize("end", ["stop", "crash", "remove"])
def test_the_cgroup_is_removed_with_the_vm(world: World, end: str) -> None:
    _, container = vm(world)
    if end == "stop":
        world.stop(container)
    elif end == "crash":
        world.outside.vms.crash(world.domain(container))
        world.outside.vms.deliver()
    else:
        world.remove(container)
    assert world.outside.cgroups.cgroups == {}


def test_the_next_start_removes_the_cgroup_of_a_vm_that_ended_meanwhile(world: World) -> None:
    _, container = vm(world)
    world.outside.vms.crash(world.domain(container))
    after = world.recovered()
    assert after.container(container).phase is ContainerPhase.EXITED
    assert after.outside.cgroups.cgroups == {}
    after.close()


def test_a_start_whose_group_cannot_be_made_fails_and_leaves_nothing_running(world: World) -> None:
    _, container = vm(world, start=False)
    world.outside.cgroups.refuses = "cpuset_cpus: no such CPU"
    with pytest.raises(InvalidRequest, match="cpuset_cpus"):
        world.start(container)
    assert world.container(container).phase is ContainerPhase.EXITED
    assert world.outside.vms.running() == []


def test_a_running_vm_gets_new_quota_vcpus_and_memory_at_once(world: World) -> None:
    _, container = vm(world)
    resize(world, container, cpu_quota=250_000, memory_limit_bytes=2 * GIB)
    assert (spec(world, container).size.vcpus, spec(world, container).size.memory_bytes) == (3, 2 * GIB)
    group = world.outside.cgroups.group(container)
    assert (group.limits.cpu_quota, group.limits.memory) == (250_000, 2 * GIB + 200 * MIB)
    shown = world.container(container).resources
    assert (shown.cpu_quota, shown.memory_limit_bytes, shown.cpu_shares) == (250_000, 2 * GIB, 512)


def test_a_created_vm_is_resized_before_it_boots(world: World) -> None:
    _, container = vm(world, start=False)
    resize(world, container, cpu_quota=200_000, memory_limit_bytes=512 * MIB)
    assert world.outside.cgroups.cgroups == {}
    world.start(container)
    assert (spec(world, container).size.vcpus, spec(world, container).size.memory_bytes) == (2, 512 * MIB)
    assert world.outside.cgroups.group(container).limits.cpu_quota == 200_000


def test_new_values_survive_a_restart_of_the_daemon(world: World) -> None:
    _, container = vm(world)
    resize(world, container, cpu_quota=50_000)
    after = world.recovered()
    assert after.container(container).resources.cpu_quota == 50_000
    assert after.container(container).status.size == VmSize(1, 4, GIB, 2 * GIB)
    after.close()


def test_the_same_values_again_change_nothing(world: World) -> None:
    _, container = vm(world)
    world.journal.calls.clear()
    resize(world, container, cpu_quota=100_000, memory_limit_bytes=GIB)
    resize(world, container)
    assert world.journal.calls == []


def test_a_repeated_create_still_finds_a_resized_container(world: World) -> None:
    sandbox, container = vm(world, start=False)
    resize(world, container, cpu_quota=50_000)
    assert world.create(sandbox, config=container_config(resources=START)) == container


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"cpu_quota": 450_000, "memory_limit_bytes": 2 * GIB}, WrongState, r"virtshim\.io/max-vcpus"),
        ({"cpu_quota": 200_000, "memory_limit_bytes": 3 * GIB}, WrongState, r"virtshim\.io/max-memory"),
        ({"cpu_quota": 200_000, "memory_limit_bytes": MIB}, InvalidRequest, r"vm\.min_memory"),
    ],
)
def test_a_resize_beyond_the_vms_maximum_is_refused_and_the_old_values_stay(
    world: World, changes: dict[str, int], error: type[ShimError], says: str
) -> None:
    _, container = vm(world)
    before = picture(world, container)
    with pytest.raises(error, match=says):
        resize(world, container, **changes)
    assert picture(world, container) == before


def test_a_resize_below_the_memory_that_the_guest_uses_is_refused(world: World) -> None:
    _, container = vm(world)
    before = picture(world, container)
    world.outside.resizing.used = 600 * MIB
    with pytest.raises(WrongState, match="the guest uses"):
        resize(world, container, memory_limit_bytes=512 * MIB, cpu_quota=200_000)
    world.outside.resizing.used = None
    with pytest.raises(WrongState, match="no virtio balloon driver"):
        resize(world, container, memory_limit_bytes=512 * MIB)
    assert picture(world, container) == before


def test_if_a_guest_does_not_release_memory_the_resize_changes_nothing(world: World) -> None:
    _, container = vm(world)
    before = picture(world, container)
    world.outside.resizing.stubborn.add(world.domain(container))
    with pytest.raises(WrongState, match="did not give memory back"):
        resize(world, container, memory_limit_bytes=512 * MIB, cpu_quota=50_000)
    assert picture(world, container) == before


def test_an_interrupted_resize_is_completed_without_a_repeated_call(tmp_path: Path) -> None:
    """Its user has taken it back by then: kubelet compares with what the record says."""
    world = World(tmp_path)
    _, container = vm(world)
    world.journal.fail("resizing.set_memory", WrongState("no"), after=True)
    world.outside.resizing.stubborn.add(world.domain(container))
    with pytest.raises(WrongState):
        resize(world, container, memory_limit_bytes=2 * GIB)
    half = world.container(container)
    assert half.status.resizing is not None
    assert half.status.size.memory_bytes == GIB
    world = world.recovered()
    whole = world.container(container)
    assert whole.status.resizing is None
    assert whole.resources.memory_limit_bytes == whole.status.size.memory_bytes == 2 * GIB
    assert spec(world, container).size.memory_bytes == 2 * GIB
    world.close()


def test_an_interrupted_resize_beyond_new_limits_does_not_block_later_resizes(
    tmp_path: Path,
) -> None:
    """Its operator has lowered `vm.max_vcpus` when virtshim starts again."""
    world = World(tmp_path)
    _, container = vm(world)
    world.journal.crash(1, When.AFTER)
    with pytest.raises(Crash):
        resize(world, container, cpu_quota=400_000)
    world.sections["vm"] = {"max_vcpus": 2}
    world = world.recovered()
    assert world.container(container).status.resizing is None
    assert world.container(container).resources == START
    resize(world, container, cpu_quota=200_000)
    assert spec(world, container).size.vcpus == world.container(container).status.size.vcpus == 2
    world.close()


def test_a_stop_does_not_wait_until_a_guest_has_given_memory_back(world: World) -> None:
    _, container = vm(world)
    before = world.container(container)
    resizing = world.outside.resizing
    resizing.slow.add(world.domain(container))
    with ThreadPoolExecutor(1) as pool:
        resized = pool.submit(resize, world, container, memory_limit_bytes=512 * MIB)
        assert resizing.waits.wait(WAIT_LIMIT)
        world.stop(container)
        with pytest.raises(Aborted, match="is being stopped"):
            resized.result(WAIT_LIMIT)
    after = world.container(container)
    assert after.phase is ContainerPhase.EXITED
    assert (after.resources, after.status.size) == (before.resources, before.status.size)


def test_if_the_kernel_refuses_a_limit_the_guest_gets_its_memory_back(world: World) -> None:
    _, container = vm(world)
    before = picture(world, container)
    world.outside.cgroups.refuses = "memory: more than that is in use"
    with pytest.raises(InvalidRequest, match="in use"):
        resize(world, container, memory_limit_bytes=512 * MIB)
    world.outside.cgroups.refuses = ""
    assert picture(world, container) == before


@pytest.mark.parametrize("step", ["cgroups.limit", "resizing.set_memory", "resizing.set_limits", "resizing.add_vcpus"])
def test_a_failure_at_any_step_leaves_the_old_values(tmp_path: Path, step: str) -> None:
    world = World(tmp_path)
    _, container = vm(world)
    before = picture(world, container)
    world.journal.fail(step, WrongState("no"))
    with pytest.raises(WrongState, match="no"):
        resize(world, container, cpu_quota=250_000, memory_limit_bytes=2 * GIB)
    assert picture(world, container) == before
    world.close()


@pytest.mark.parametrize("end", ["stop", "remove"])
def test_only_a_created_or_running_container_is_resized(world: World, end: str) -> None:
    _, container = vm(world)
    record = world.container(container)
    getattr(world, end)(container)
    with pytest.raises((WrongState, NotFound)) as refused:
        world.do.update_container_resources.resize(record, Resources(cpu_quota=50_000))
    assert isinstance(refused.value, WrongState if end == "stop" else NotFound)


# --- the pod


def pod_resize(world: World, sandbox: SandboxId, **changes: Any) -> None:
    world.do.update_sandbox_resources.resize(sandbox, Resources(), Resources(**changes))


def test_a_pods_new_totals_are_recorded(world: World) -> None:
    sandbox, _ = vm(world)
    pod_resize(world, sandbox, cpu_quota=200_000)
    world.do.update_sandbox_resources.resize(sandbox, Resources(memory_limit_bytes=300 * MIB), Resources())
    after = world.recovered()
    assert after.sandbox(sandbox).resources.cpu_quota == 200_000
    assert after.sandbox(sandbox).resources.memory_limit_bytes == GIB
    assert after.sandbox(sandbox).overhead.memory_limit_bytes == 300 * MIB
    after.close()


@pytest.mark.parametrize(
    ("changes", "says"), [({"cpu_quota": 500_000}, "max-vcpus"), ({"memory_limit_bytes": 3 * GIB}, "max-memory")]
)
def test_a_pod_resize_that_its_vm_could_not_follow_is_refused(world: World, changes: dict[str, int], says: str) -> None:
    sandbox, _ = vm(world)
    with pytest.raises(WrongState, match=says):
        pod_resize(world, sandbox, **changes)
    assert world.sandbox(sandbox).resources == START


def test_a_pod_resize_that_does_not_match_the_vm_is_left_to_the_containers_resize(world: World) -> None:
    world.pull()
    sandbox = world.run(config=sandbox_config(resources=Resources(memory_limit_bytes=5 * GIB)))
    container = world.create(sandbox, config=container_config(resources=START))
    world.start(container)
    pod_resize(world, sandbox, memory_limit_bytes=6 * GIB)
    assert world.sandbox(sandbox).resources.memory_limit_bytes == 6 * GIB


def test_the_first_limit_of_a_container_beside_the_vm_is_no_resize_of_the_vm(world: World) -> None:
    world.pull()
    sandbox = adopt(world, resources=START)
    world.start(world.create(sandbox, config=container_config(resources=START)))
    pod_resize(world, sandbox, cpu_quota=500_000, memory_limit_bytes=3 * GIB)
    assert world.sandbox(sandbox).resources.cpu_quota == 500_000


def test_a_repeated_run_still_finds_a_resized_pod(world: World) -> None:
    config = sandbox_config(resources=START)
    sandbox = world.run(config=config)
    pod_resize(world, sandbox, cpu_quota=200_000)
    assert world.run(config=config) == sandbox


def test_a_missing_pod_is_not_found(world: World) -> None:
    with pytest.raises(NotFound):
        pod_resize(world, SandboxId("f" * 64), cpu_quota=200_000)


def of_overhead(world: World, overhead: int, memory: int, **changes: Any) -> ContainerId:
    """A running VM below its pod's cgroup that may grow to 256 GiB."""
    world.pull()
    resources = Resources(memory_limit_bytes=memory)
    config = sandbox_config(
        annotations={"virtshim.io/max-memory": "256Gi"},
        **{
            "cgroup_parent": "/kubepods/pod1",
            "overhead": Resources(memory_limit_bytes=overhead),
            "resources": resources,
            **changes,
        },
    )
    container = world.create(world.run(config=config), config=container_config(resources=resources))
    world.start(container)
    return container


def test_a_vm_that_exceeds_its_pods_cgroup_is_refused_with_the_overhead_needed(world: World) -> None:
    says = r"memory overhead is 256Mi, but a virtual machine of 65536Mi needs 640Mi or more.*RuntimeClass"
    with pytest.raises(InvalidRequest, match=says):
        of_overhead(world, 256 * MIB, 64 * GIB)
    assert not world.records.containers.all()
    assert not world.outside.disks.sizes


@pytest.mark.parametrize(("overhead", "most"), [(256 * MIB, 16 * GIB), (GIB, 112 * GIB), (4 * GIB, 496 * GIB)])
def test_each_shipped_overhead_is_enough_for_its_stated_memory(world: World, overhead: int, most: int) -> None:
    container = of_overhead(world, overhead, most)
    assert world.outside.cgroups.group(container).limits.memory == most + overhead  # kubelet's limit of the pod
    with pytest.raises(InvalidRequest, match="memory overhead"):
        world.create(
            world.run("more", config=world.sandbox(world.container(container).sandbox_id).config),
            config=container_config(resources=Resources(memory_limit_bytes=most + GIB)),
        )


@pytest.mark.parametrize(
    ("overhead", "changes"),
    [(130 * MIB, {"cgroup_parent": ""}), (130 * MIB, {"cgroup_parent": "/operators"}), (0, {})],
    ids=["crictl's", "in an operator's group", "beside its pod's"],
)
def test_a_small_overhead_is_accepted_where_kubelet_sets_no_pod_limit(
    world: World, overhead: int, changes: dict[str, Any]
) -> None:
    container = of_overhead(world, overhead, 64 * GIB, **changes)
    assert world.outside.cgroups.group(container).limits.memory == 64 * GIB + 640 * MIB


def test_memory_beyond_what_the_overhead_covers_is_refused_before_anything_changes(world: World) -> None:
    container = of_overhead(world, 256 * MIB, GIB)
    before, sandbox = picture(world, container), world.container(container).sandbox_id
    more = Resources(memory_limit_bytes=64 * GIB)
    with pytest.raises(InvalidRequest, match="needs 640Mi or more"):
        world.do.update_sandbox_resources.resize(sandbox, Resources(), more)
    with pytest.raises(InvalidRequest, match="needs 640Mi or more"):
        resize(world, container, memory_limit_bytes=64 * GIB)
    assert picture(world, container) == before
    assert world.sandbox(sandbox).resources.memory_limit_bytes == GIB
    resize(world, container, memory_limit_bytes=16 * GIB)


def test_an_overhead_that_shrinks_below_what_its_running_vm_needs_is_refused(world: World) -> None:
    container = of_overhead(world, 256 * MIB, 16 * GIB)
    sandbox = world.container(container).sandbox_id
    with pytest.raises(InvalidRequest, match="needs 256Mi or more"):
        world.do.update_sandbox_resources.resize(sandbox, Resources(memory_limit_bytes=200 * MIB), Resources())
    assert world.sandbox(sandbox).overhead.memory_limit_bytes == 256 * MIB


def test_an_older_vm_with_too_small_an_overhead_can_still_be_resized_in_other_values(world: World) -> None:
    container = of_overhead(world, 640 * MIB, 64 * GIB)
    sandbox = world.sandbox(world.container(container).sandbox_id)
    less = Resources(memory_limit_bytes=256 * MIB)
    world.records.sandboxes.replace(dataclasses.replace(sandbox, changed_overhead=less))
    world.do.update_sandbox_resources.resize(sandbox.id, less, Resources(cpu_quota=50_000))
    resize(world, container, cpu_quota=50_000)
    resize(world, container, memory_limit_bytes=8 * GIB)
