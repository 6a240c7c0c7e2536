"""The periodic look at all pods finds lost networks, lost events, and VMs that wait for disk space."""

import threading

import pytest
from fakes.world import World

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import Unavailable
from virtshim.model.vm import OffReason, PauseReason, Power


def test_an_idle_node_causes_no_calls_and_no_writes(world: World) -> None:
    world.app.watch.look()
    assert world.journal.calls == []


def test_a_healthy_pod_is_left_as_it_is(world: World) -> None:
    sandbox, container = world.running()
    before = world.sandbox(sandbox), world.container(container)
    world.journal.calls.clear()
    world.app.watch.look()
    assert (world.sandbox(sandbox), world.container(container)) == before
    assert set(world.journal.calls) == {"vms.owned", "networks.attached", "networks.lost"}


def test_a_sandbox_whose_network_was_dismantled_is_not_ready_with_the_reason(world: World) -> None:
    sandbox, container = world.running()
    other = world.run("other")
    world.outside.networks.broken[sandbox] = "the tap tap0 in /run/netns/x"
    world.app.watch.look()
    lost = world.sandbox(sandbox)
    assert not lost.is_ready
    assert lost.reason == "its network is gone: the tap tap0 in /run/netns/x"
    assert world.sandbox(other).is_ready
    # kubelet sees it, stops what runs and cleans up.
    assert world.container(container).phase is ContainerPhase.RUNNING
    world.stop_sandbox(sandbox)
    world.remove_sandbox(sandbox)
    world.remove_sandbox(other)
    assert world.everything() == []


def test_a_sandbox_that_tapmanager_has_forgotten_is_not_ready(world: World) -> None:
    sandbox, _ = world.running()
    world.outside.networks.lose()
    world.app.watch.look()
    world.app.watch.look()
    assert "tapmanager no longer knows it" in world.sandbox(sandbox).reason


def test_a_tapmanager_that_is_away_loses_no_network(world: World) -> None:
    sandbox, _ = world.running()
    world.journal.fail("networks.attached", Unavailable("tapmanager is gone"))
    world.app.watch.look()
    assert world.sandbox(sandbox).is_ready


def test_an_end_whose_event_was_lost_is_found(world: World) -> None:
    _, container = world.running()
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.app.watch.look()
    ended = world.container(container).exit
    assert ended is not None
    assert ended.code == 0


def test_a_vm_that_vanished_from_libvirt_is_found(world: World) -> None:
    _, container = world.running()
    world.outside.vms.domains.clear()
    world.app.watch.look()
    ended = world.container(container).exit
    assert ended is not None
    assert ended.code == 255


def test_a_vm_halted_by_a_full_disk_resumes_when_there_is_space(world: World) -> None:
    _, container = world.running()
    domain = world.domain(container)
    world.outside.disks.free = 1 << 20
    world.outside.vms.halt(domain)
    world.app.watch.look()
    assert world.outside.vms.power(domain).power is Power.PAUSED
    assert world.container(container).status.trouble
    world.outside.disks.free = 1 << 30
    world.app.watch.look()
    assert world.outside.vms.power(domain).power is Power.RUNNING
    assert world.container(container).status.trouble == ""


@pytest.mark.parametrize("why", [PauseReason.OTHER, PauseReason.GUEST])
def test_a_vm_that_was_paused_on_purpose_stays_paused(world: World, why: PauseReason) -> None:
    _, container = world.running()
    world.outside.vms.halt(world.domain(container), why)
    world.app.watch.look()
    assert world.outside.vms.power(world.domain(container)).power is Power.PAUSED
    assert world.container(container).status.trouble


def test_a_pause_for_another_reason_than_space_is_not_ended(world: World) -> None:
    _, container = world.running()
    domain = world.domain(container)
    world.outside.vms.halt(domain)
    world.outside.vms.full.clear()
    world.app.watch.look()
    assert world.outside.vms.power(domain).power is Power.PAUSED


def test_one_pod_that_cannot_be_read_does_not_hide_the_others(world: World) -> None:
    _, first = world.running("one")
    _, second = world.running("two")
    for container in (first, second):
        world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.journal.fail("vms.power", Unavailable("libvirt hiccup"))
    world.app.watch.look()
    phases = {world.container(c).phase for c in (first, second)}
    assert phases == {ContainerPhase.RUNNING, ContainerPhase.EXITED}
    world.app.watch.look()
    assert {world.container(c).phase for c in (first, second)} == {ContainerPhase.EXITED}


def test_rounds_continue_until_they_are_stopped(world: World) -> None:
    _, container = world.running()
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    stopping = threading.Event()
    world.outside.clock.at(25, stopping.set)
    world.journal.calls.clear()
    world.app.watch.run(stopping)
    assert world.journal.calls.count("networks.attached") == 3
    assert world.container(container).phase is ContainerPhase.EXITED
