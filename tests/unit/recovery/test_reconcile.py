"""The periodic reconciliation removes virtshim's objects without a record, and nothing else."""

from __future__ import annotations

import threading
import uuid

import pytest
from fakes.vms import FakeDomain
from fakes.world import World

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import InternalError, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.sandbox import SandboxPhase
from virtshim.model.vm import Power, PowerState
from virtshim.pods.ports import AttachRequest


def looked(world: World, times: int = 2) -> None:
    for _ in range(times):
        world.app.recovery.reconcile.look()
        world.outside.clock.advance(61)


def litter(world: World) -> None:
    """Of everything one that is ours and has no record."""
    sandbox, container = world.running("gone")
    record, spec = world.sandbox(sandbox), world.outside.vms.spec(world.domain(container))
    world.remove_sandbox(sandbox)
    world.outside.vms.add_stray(spec, name="virtshim-stray")
    world.outside.networks.attach(AttachRequest(sandbox, record.key, record.config.dns), 1)
    world.outside.disks.directories[container] = {"root.qcow2"}
    world.outside.disks.pod_disks[f"{'f' * 64}/x"] = next(iter(world.outside.files.files))
    world.outside.files.publish("registry.test/lost:1", b"nobody knows it")
    world.outside.files.fetch("registry.test/lost:1", None, threading.Event())


def test_an_idle_node_is_left_as_it_is(world: World) -> None:
    sandbox, container = world.running()
    before = world.sandbox(sandbox), world.container(container), world.everything()
    looked(world, 3)
    assert (world.sandbox(sandbox), world.container(container), world.everything()) == before


def test_leftovers_go_when_they_were_seen_twice_a_minute_apart(world: World) -> None:
    sandbox, container = world.running()
    litter(world)
    assert len(world.leftovers()) == 6
    world.app.recovery.reconcile.look()
    world.outside.clock.advance(30)
    world.app.recovery.reconcile.look()
    assert len(world.leftovers()) == 6
    world.outside.clock.advance(31)
    world.app.recovery.reconcile.look()
    assert world.leftovers() == []
    assert world.sandbox(sandbox).is_ready
    assert world.container(container).phase is ContainerPhase.RUNNING


def test_foreign_vms_are_never_touched(world: World) -> None:
    litter(world)
    foreign = uuid.uuid4()
    world.outside.vms.add_foreign(foreign, "somebody-elses")
    looked(world)
    assert world.outside.vms.domains == {foreign: FakeDomain("somebody-elses", None, PowerState(Power.RUNNING))}


def test_an_object_that_exists_only_at_one_look_is_no_leftover(world: World) -> None:
    litter(world)
    stray = ContainerId("9" * 64)
    world.outside.disks.directories[stray] = set()
    world.app.recovery.reconcile.look()
    del world.outside.disks.directories[stray]
    world.outside.clock.advance(61)
    world.app.recovery.reconcile.look()
    world.outside.disks.directories[stray] = set()
    world.app.recovery.reconcile.look()
    assert stray in world.outside.disks.directories


def test_a_pod_in_use_by_a_call_is_skipped(world: World) -> None:
    """However long the call takes: its half-made records are its own."""
    gate = world.journal.hold("networks.attach")
    call = threading.Thread(target=world.run)
    call.start()
    gate.wait()
    looked(world, 3)
    (sandbox,) = world.records.sandboxes.all()
    assert sandbox.phase is SandboxPhase.CREATING
    gate.open()
    call.join()
    assert world.sandbox(sandbox.id).is_ready


def test_an_abandoned_half_made_sandbox_is_undone(world: World) -> None:
    world.journal.fail("networks.attach", InternalError("no address"))
    world.journal.fail("networks.release", InternalError("CNI fails"))
    with pytest.raises(InternalError):
        world.run()
    (left,) = world.records.sandboxes.all()
    world.records.sandboxes.replace(left.removing())
    looked(world)
    assert world.everything() == []


def test_a_removal_that_failed_is_finished(world: World) -> None:
    sandbox, container = world.running()
    world.journal.fail("disks.delete", InternalError("busy"))
    with pytest.raises(InternalError):
        world.remove(container)
    assert world.container(container).phase is ContainerPhase.REMOVING
    looked(world)
    assert world.records.containers.get(container) is None
    assert world.sandbox(sandbox).is_ready


def test_a_lost_end_is_recorded(world: World) -> None:
    _, container = world.running()
    world.outside.vms.domains[world.domain(container)].state = PowerState(Power.OFF)
    looked(world)
    assert world.container(container).phase is ContainerPhase.EXITED


def test_a_leftover_that_cannot_be_removed_delays_no_other_and_is_in_the_status(world: World) -> None:
    litter(world)
    world.journal.fail("vms.destroy", InternalError("QEMU hangs"), times=100)
    looked(world)
    assert [left for left in world.leftovers() if not left.startswith("VM")] == []
    assert "QEMU hangs" in str(world.do.node.facts()["unfinished"])
    world.journal.heal()
    looked(world)
    assert world.leftovers() == []
    assert world.do.node.facts()["unfinished"] == {}


@pytest.mark.parametrize("reading", ["vms.take", "networks.attached", "disks.existing"])
def test_if_the_world_cannot_be_read_nothing_is_changed(world: World, reading: str) -> None:
    litter(world)
    world.app.recovery.reconcile.look()
    world.outside.clock.advance(61)
    world.journal.fail(reading, Unavailable("not there"))
    with pytest.raises(Unavailable):
        world.app.recovery.reconcile.look()
    assert len(world.leftovers()) == 6


def test_a_vm_that_libvirt_cannot_show_keeps_everything_without_record_from_being_deleted(world: World) -> None:
    litter(world)
    world.outside.vms.unreadable.add("virtshim-stray")
    looked(world)
    assert len([left for left in world.leftovers() if not left.startswith("image")]) == 5


def test_nothing_is_deleted_because_of_a_damaged_database(world: World) -> None:
    litter(world)
    world.app.recovery.reconcile.look()
    world.outside.clock.advance(61)
    world.damage_database()
    world.app.recovery.reconcile.look()
    assert len(world.leftovers()) == 6
    runtime, _network = world.do.node.conditions()
    assert "is damaged" in runtime.trouble
    assert runtime.reason == "StateDatabaseUnusable"


def test_the_look_is_repeated_and_survives_an_error(world: World) -> None:
    litter(world)
    stopping = threading.Event()
    world.journal.fail("networks.attached", Unavailable("not there"))
    real, looks = world.outside.clock.wait, []

    def wait(event: threading.Event, seconds: float) -> bool:
        looks.append(seconds)
        if len(looks) == 6:
            event.set()
        return real(event, seconds)

    world.outside.clock.wait = wait  # type: ignore[method-assign]
    world.app.recovery.reconcile.run(stopping)
    assert world.leftovers() == []
    assert (looks[0], looks[-1], min(looks)) == (300.0, 300.0, 60.0)
