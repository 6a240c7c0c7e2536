"""Sandboxes that another runtime made end in order when their network goes away, also over restarts of virtshim."""

from __future__ import annotations

from fakes.adopted import ADOPTION, CGROUP, NETNS, SANDBOX, adopt, running
from fakes.waiting import eventually
from fakes.world import LOG_DIRECTORY, World, pod_key

from virtshim.model.container import ContainerPhase, ExitReason
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.sandbox import SandboxPhase

GONE = f"the namespace {NETNS}"
OTHER = SandboxId("d00d" * 16)
KEEP = {"virtshim.io/root-disk": "pod"}


def test_a_namespace_that_is_gone_ends_the_vm_and_the_container_says_why(world: World) -> None:
    container = running(world)
    world.outside.networks.broken[SANDBOX] = GONE
    world.app.watch.look()
    record = world.sandbox(SANDBOX)
    assert (record.phase, record.reason) == (SandboxPhase.NOT_READY, f"its network is gone: {GONE}")
    assert world.outside.vms.running() == []
    ended = world.container(container)
    assert ended.phase is ContainerPhase.EXITED
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.reason) == (137, ExitReason.NETWORK_LOST)
    assert GONE in ended.exit.message
    assert SANDBOX not in world.outside.networks.networks


def test_the_record_of_a_lost_sandbox_goes_with_its_last_container(world: World) -> None:
    container = running(world)
    world.outside.networks.broken[SANDBOX] = GONE
    world.app.watch.look()
    world.app.watch.look()
    assert world.records.sandboxes.get(SANDBOX) is not None  # kubelet may still ask for the container
    world.remove(container)
    world.app.watch.look()
    assert world.everything() == []


def test_the_record_of_a_lost_sandbox_without_a_container_goes_at_once(world: World) -> None:
    adopt(world)
    world.outside.networks.broken[SANDBOX] = GONE
    world.app.watch.look()
    assert world.everything() == []


def test_a_kept_disk_waits_for_the_pods_next_sandbox_without_a_container(world: World) -> None:
    """kubelet removes dead containers at once with `maximum-dead-containers-per-container: 0`, and may make the next sandbox
    much later."""
    first = _lost_with_a_kept_disk(world)
    disk = world.container(first).spec.pod_disk
    world.remove(first)
    world.app.watch.look()
    assert disk in world.outside.disks.pod_disks
    second = running(world, OTHER, attempt=1, annotations=KEEP)
    assert world.container(second).spec.pod_disk == disk
    world.app.watch.look()
    assert world.records.sandboxes.get(SANDBOX) is None
    assert disk in world.outside.disks.pod_disks
    world.remove_sandbox(OTHER)
    assert world.everything() == []


def test_a_kept_disk_waits_over_a_reboot(world: World) -> None:
    world.outside.kubelet_volumes.pods.add(LOG_DIRECTORY)
    first = running(world, annotations=KEEP)
    after = world.recovered(rebooted=True)
    after.remove(first)
    after.app.watch.look()
    assert after.outside.disks.pod_disks
    second = running(after, OTHER, attempt=1, annotations=KEEP)
    assert after.container(second).spec.pod_disk in after.outside.disks.pod_disks


def test_a_kept_disk_waits_when_the_next_sandbox_is_lost_too(world: World) -> None:
    world.remove(_lost_with_a_kept_disk(world))
    adopt(world, OTHER, attempt=1, annotations=KEEP)
    world.outside.networks.broken[OTHER] = GONE
    world.app.watch.look()
    world.app.watch.look()
    assert [one.id for one in world.records.sandboxes.all()] == [OTHER]
    assert world.outside.disks.pod_disks


def test_a_kept_disk_goes_with_the_pod(world: World) -> None:
    world.remove(_lost_with_a_kept_disk(world))
    world.app.watch.look()
    assert world.outside.disks.pod_disks
    world.outside.kubelet_volumes.pods.clear()
    world.app.watch.look()
    assert world.everything() == []


def test_a_kept_disk_goes_when_kubelet_removes_the_pods_last_sandbox(world: World) -> None:
    _lost_with_a_kept_disk(world)
    world.remove_sandbox(SANDBOX)
    assert world.everything() == []


def _lost_with_a_kept_disk(world: World) -> ContainerId:
    """A container that has ended with its pod's network. kubelet still has the pod."""
    world.outside.kubelet_volumes.pods.add(LOG_DIRECTORY)
    container = running(world, annotations=KEEP)
    world.outside.networks.broken[SANDBOX] = GONE
    world.app.watch.look()
    return container


def test_a_sandbox_without_a_vm_stays_while_its_network_is_there(world: World) -> None:
    adopt(world)
    world.app.watch.look()
    assert world.sandbox(SANDBOX).is_ready


def test_the_end_of_one_pods_vm_is_not_waited_for_by_the_others(world: World) -> None:
    first = running(world)
    second = world.create(adopt(world, OTHER, attempt=1))
    world.outside.networks.broken[SANDBOX] = GONE
    gate = world.journal.hold("vms.destroy")
    world.app.watch.look()
    gate.wait()
    world.start(second)
    assert world.container(second).is_running
    gate.open()
    eventually(lambda: world.sandbox(SANDBOX).network_released)
    assert world.container(first).phase is ContainerPhase.EXITED


def test_a_stopped_and_removed_sandbox_leaves_nothing_and_a_repeat_finds_nothing(world: World) -> None:
    container = running(world)
    world.stop_sandbox(SANDBOX)
    assert world.container(container).phase is ContainerPhase.EXITED
    assert SANDBOX not in world.outside.networks.networks
    world.stop_sandbox(SANDBOX)
    world.remove_sandbox(SANDBOX)
    assert world.everything() == []


def test_a_restarted_virtshim_continues_with_the_vm_and_its_sandbox(world: World) -> None:
    container = running(world)
    before = world.sandbox(SANDBOX)
    after = world.recovered()
    assert after.sandbox(SANDBOX) == before
    assert after.sandbox(SANDBOX).adopted == ADOPTION
    assert after.container(container).is_running
    assert after.container(container).spec.cgroup_parent == CGROUP
    after.app.watch.look()
    assert after.container(container).is_running
    adopt(after)
    after.remove_sandbox(SANDBOX)
    assert after.everything() == []


def test_a_namespace_that_went_while_virtshim_was_down_ends_the_vm(world: World) -> None:
    container = running(world)
    world.outside.networks.lose()
    after = world.recovered()
    assert not after.sandbox(SANDBOX).is_ready
    after.app.watch.look()
    assert after.outside.vms.running() == []
    exit_ = after.container(container).exit
    assert exit_ is not None
    assert exit_.reason is ExitReason.NETWORK_LOST


def test_after_a_reboot_the_sandbox_is_not_ready_and_nothing_runs_in_it(world: World) -> None:
    container = running(world)
    after = world.recovered(rebooted=True)
    assert after.sandbox(SANDBOX).phase is SandboxPhase.NOT_READY
    assert after.container(container).phase is ContainerPhase.EXITED
    after.app.watch.look()
    after.remove(container)
    after.app.watch.look()
    assert after.everything() == []


def test_a_half_made_adoption_is_undone_by_the_next_start_and_can_be_repeated(world: World) -> None:
    adopt(world)
    record = world.sandbox(SANDBOX)
    world.records.sandboxes.delete(SANDBOX)
    world.records.sandboxes.add(
        type(record)(id=SANDBOX, key=pod_key(), config=record.config, created_at=1, adopted=ADOPTION)
    )
    after = world.recovered()
    assert after.everything() == []
    adopt(after)
    assert after.sandbox(SANDBOX).is_ready


def test_an_attached_namespace_without_a_record_is_released_by_the_next_start(world: World) -> None:
    adopt(world)
    world.records.sandboxes.delete(SANDBOX)
    assert world.recovered().everything() == []
