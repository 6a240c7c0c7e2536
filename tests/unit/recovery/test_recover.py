"""After a start that follows a stop, a kill or a reboot, records and world agree again."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.journal import WAIT_LIMIT
from fakes.world import LOG_DIRECTORY, World, sandbox_config

from virtshim.model.container import ContainerPhase, ExitReason
from virtshim.model.errors import InternalError, Unavailable
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.sandbox import SandboxPhase
from virtshim.model.vm import OffReason, Power
from virtshim.pods.ports import AttachRequest


@pytest.fixture
def worlds(world: World):
    """Closes every further daemon of a test."""
    made: list[World] = []

    def restart(**how: bool) -> World:
        made.append((made[-1] if made else world).recovered(**how))
        return made[-1]

    yield restart
    for later in made:
        later.close()


def test_a_running_pod_is_unchanged_by_recovery(world: World, worlds) -> None:
    sandbox, container = world.running()
    before = (world.sandbox(sandbox), world.container(container))
    after = worlds()
    assert (after.sandbox(sandbox), after.container(container)) == before
    assert after.outside.vms.domains[after.domain(container)].boots == 1


def test_the_console_of_a_running_vm_is_followed_again(world: World, worlds) -> None:
    _, container = world.running()
    assert worlds().outside.consoles.following == {container: f"{LOG_DIRECTORY}/vm/0.log"}


def test_a_vm_that_kept_running_can_be_stopped(world: World, worlds) -> None:
    _, container = world.running()
    after = worlds()
    after.stop(container, 30)
    assert after.container(container).phase is ContainerPhase.EXITED


@pytest.mark.parametrize(
    ("reason", "code"), [(OffReason.SHUTDOWN, 0), (OffReason.CRASHED, 137), (OffReason.DESTROYED, 137)]
)
def test_a_vm_that_ended_meanwhile_has_its_exit_code(world: World, worlds, reason: OffReason, code: int) -> None:
    _, container = world.running()
    world.outside.vms.end(world.domain(container), reason)
    after = worlds()
    ended = after.container(container)
    assert ended.exit is not None
    assert ended.exit.code == code
    assert after.outside.consoles.finished == [ended.spec.log_file]


def test_after_a_reboot_every_running_container_ended_unknown(world: World, worlds) -> None:
    _, container = world.running()
    ended = worlds(rebooted=True).container(container)
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.reason) == (255, ExitReason.UNKNOWN)
    assert "restarted" in ended.exit.message


def test_after_a_reboot_every_ready_sandbox_is_not_ready_and_can_be_removed(world: World, worlds) -> None:
    sandbox, _ = world.running()
    after = worlds(rebooted=True)
    record = after.sandbox(sandbox)
    assert record.phase is SandboxPhase.NOT_READY
    assert "network is gone" in record.reason
    assert not record.network_released  # CNI may hold the address still
    after.remove_sandbox(sandbox)
    assert after.everything() == []


def test_a_console_that_cannot_be_opened_after_a_reboot_does_not_leave_the_container_running(world: World) -> None:
    _, container = world.running()
    after = world.restarted(rebooted=True)
    after.journal.fail("consoles.open", InternalError("no such directory"))
    after.app.recovery.recover.run(rebooted=True)
    assert after.container(container).phase is ContainerPhase.EXITED
    after.close()


def test_a_network_that_vanished_makes_the_sandbox_not_ready_and_the_others_stay(world: World, worlds) -> None:
    lost, kept = world.run("lost"), world.run("kept")
    world.outside.networks.release(lost, 1)
    after = worlds()
    assert after.sandbox(lost).phase is SandboxPhase.NOT_READY
    assert after.sandbox(kept).phase is SandboxPhase.READY


def test_recovering_twice_changes_nothing(world: World, worlds) -> None:
    sandbox, container = world.running()
    first = worlds()
    before = (first.sandbox(sandbox), first.container(container), first.everything())
    first.app.recovery.recover.run(rebooted=False)
    assert (first.sandbox(sandbox), first.container(container), first.everything()) == before


def test_our_strays_are_removed(world: World, worlds) -> None:
    template, container = world.running("template")
    like = world.outside.vms.spec(world.domain(container))
    world.remove_sandbox(template)
    out = world.outside
    out.vms.add_stray(like, Power.RUNNING, container_id=ContainerId("e" * 64), name="one")
    out.vms.add_stray(like, Power.OFF, container_id=ContainerId("d" * 64), name="two")
    lost = world.sandbox(world.run()).key
    out.networks.half_attach(AttachRequest(SandboxId("f" * 64), lost, sandbox_config().dns), 1)
    out.disks.directories[ContainerId("9" * 64)] = {"root.qcow2"}
    assert len(world.leftovers()) == 5
    assert worlds().leftovers() == []


def test_a_vm_whose_failed_start_could_not_be_undone_is_ended(world: World, worlds) -> None:
    container = world.create(world.run())
    world.journal.fail("vms.start", Unavailable("lost the answer"), after=True)
    world.journal.fail("vms.destroy", Unavailable("libvirt is gone"))
    with pytest.raises(Unavailable):
        world.start(container)
    assert len(world.outside.vms.running()) == 1
    assert worlds().outside.vms.running() == []


def test_a_stray_that_cannot_be_removed_does_not_hold_up_the_rest(world: World) -> None:
    _, container = world.running()
    world.outside.disks.directories[ContainerId("8" * 64)] = set()
    world.outside.disks.directories[ContainerId("9" * 64)] = set()
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    after = world.restarted()
    after.journal.fail("disks.delete", InternalError("busy"))
    after.app.recovery.recover.run(rebooted=False)
    assert len(after.leftovers()) == 1
    assert after.container(container).phase is ContainerPhase.EXITED
    after.close()


@pytest.mark.parametrize("reading", ["vms.take", "networks.attached", "disks.existing"])
def test_if_the_world_cannot_be_read_nothing_is_changed(world: World, reading: str) -> None:
    world.running()
    world.outside.disks.directories[ContainerId("9" * 64)] = {"root.qcow2"}
    after = world.restarted()
    after.journal.fail(reading, Unavailable("not there yet"))
    with pytest.raises(Unavailable):
        after.app.recovery.recover.run(rebooted=False)
    assert not {call.rpartition(".")[2] for call in after.journal.calls} & {
        "delete", "destroy", "undefine", "release", "replace", "add", "put",
    }  # fmt: skip
    after.close()


def test_power_events_during_recovery_are_not_missed(world: World) -> None:
    """`App.recover` subscribes before it reads: what ends in between is not missed."""
    _, container = world.running()
    after = world.restarted()
    after.outside.vms.forget()
    gate_closed = after.journal.hold("consoles.open")
    recovery = threading.Thread(target=after.app.recover)
    recovery.start()
    gate_closed.wait()  # the plan is made, it says that the VM runs
    after.outside.vms.end(after.domain(container), OffReason.SHUTDOWN)
    gate_closed.open()
    recovery.join()
    after.outside.vms.deliver()
    assert after.container(container).phase is ContainerPhase.EXITED
    assert after.outside.consoles.following == {}
    after.close()


def test_the_remembered_boot_distinguishes_a_restart_from_a_reboot(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own is another after a reboot only."""
    _, container = world.running()
    monkeypatch.setattr("virtshim.system.machine.boot_id", lambda: "boot-1")
    world.app.recover()
    assert world.container(container).phase is ContainerPhase.RUNNING
    again = world.restarted()
    again.app.recover()
    assert again.container(container).phase is ContainerPhase.RUNNING
    later = again.restarted(rebooted=True)
    monkeypatch.setattr("virtshim.system.machine.boot_id", lambda: "boot-2")
    later.app.recover()
    ended = later.container(container)
    assert ended.exit is not None
    assert ended.exit.message == "the node was restarted"
    later.close()


def test_the_node_keeps_its_id(world: World, worlds) -> None:
    assert world.records.node_id() == worlds().records.node_id()


def test_a_stuck_repair_is_reported_and_all_other_pods_are_served(world: World, worlds) -> None:
    _, first = world.running("first")
    _, second = world.running("second")
    after = world.restarted()
    after.app.recovery.recover.repair_runner.limit = 0.1
    gate = after.journal.hold("consoles.open")
    after.app.recovery.recover.run(rebooted=False)
    assert set(after.outside.consoles.following) == {second}
    assert f"running container {first.short}" in after.app.recovery.recover.repair_runner.unfinished()
    assert first.short in str(after.do.node.facts()["unfinished"])
    gate.open()
    wait_for(lambda: first in after.outside.consoles.following)
    wait_for(lambda: after.app.recovery.recover.repair_runner.unfinished() == {})
    after.close()


def test_the_reconciler_follows_a_vm_whose_follow_failed_at_start(world: World) -> None:
    _, container = world.running()
    after = world.restarted()
    after.journal.fail("consoles.open", InternalError("the log directory is not mounted yet"))
    after.app.recovery.recover.run(rebooted=False)
    assert after.outside.consoles.following == {}
    for _ in range(2):
        after.app.recovery.reconcile.look()
        after.outside.clock.advance(61)
    assert container in after.outside.consoles.following
    after.close()


def test_while_one_step_for_a_pod_is_stuck_no_other_begins_for_that_pod(world: World) -> None:
    sandbox, container = world.running()
    other, _ = world.running("other")
    world.outside.networks.lose()
    after = world.restarted()
    after.app.recovery.recover.repair_runner.limit = 0.1
    gate = after.journal.hold("consoles.open")
    after.app.recovery.recover.run(rebooted=False)
    assert after.sandbox(sandbox).is_ready  # its turn comes later
    assert not after.sandbox(other).is_ready
    gate.open()
    wait_for(lambda: container in after.outside.consoles.following)
    for _ in range(2):
        after.app.recovery.reconcile.look()
        after.outside.clock.advance(61)
    assert not after.sandbox(sandbox).is_ready
    after.close()


def wait_for(condition: Callable[[], bool]) -> None:
    """What another thread is about to do."""
    until = time.monotonic() + WAIT_LIMIT
    while not condition():
        assert time.monotonic() < until
        threading.Event().wait(0.005)
