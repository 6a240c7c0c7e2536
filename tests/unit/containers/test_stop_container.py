"""StopContainer presses the power button, waits, and then destroys the VM, even if stops and other calls overlap."""

import pytest
from fakes.background import Background
from fakes.world import World, container_config
from podclient import wait_until

from virtshim.model.container import ContainerPhase, Exit, ExitReason, Mount
from virtshim.model.errors import InternalError, ResourceExhausted, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason


def exit_of(world: World, container: ContainerId) -> Exit:
    record = world.container(container)
    assert record.phase is ContainerPhase.EXITED
    assert record.exit is not None
    return record.exit


def test_a_guest_that_shuts_down_on_its_power_button_counts_as_interrupted(world: World) -> None:
    """What a Job did in it is not completed, and kubelet begins an OnFailure pod again."""
    _, container = world.running()
    world.stop(container, 30)
    ended = exit_of(world, container)
    assert (ended.code, ended.reason) == (143, ExitReason.ERROR)
    assert "was stopped" in ended.message
    assert world.journal.count("vms.destroy") == 0


def test_a_deaf_guest_is_killed_after_the_grace_period(world: World) -> None:
    _, container = world.running()
    world.outside.vms.shuts_down_after = None
    before = world.outside.clock.monotonic()
    world.stop(container, 30)
    assert world.outside.clock.monotonic() - before == 30
    ended = exit_of(world, container)
    assert (ended.code, ended.reason) == (137, ExitReason.ERROR)
    assert "within 30 s" in ended.message


def test_a_stop_returns_as_soon_as_the_guest_is_off(world: World) -> None:
    _, container = world.running()
    world.outside.vms.shuts_down_after = 3.0
    before = world.outside.clock.monotonic()
    world.stop(container, 3600)
    assert world.outside.clock.monotonic() - before == 3
    assert exit_of(world, container).code == 143


def test_the_power_button_is_pressed_again_for_a_guest_that_is_still_booting(world: World) -> None:
    _, container = world.running()
    world.outside.vms.shuts_down_after = None
    world.outside.clock.at(12, lambda: setattr(world.outside.vms, "shuts_down_after", 0.0))
    world.stop(container, 60)
    assert exit_of(world, container).code == 143
    begin = world.outside.vms.pressed[0][1]
    assert [at - begin for _, at in world.outside.vms.pressed] == [0, 5, 10, 15]


def test_without_grace_the_vm_is_killed_at_once(world: World) -> None:
    _, container = world.running()
    world.outside.vms.shuts_down_after = None
    world.stop(container, 0)
    assert world.outside.vms.pressed == []
    assert exit_of(world, container).message == "killed: no grace period"


def test_the_log_is_finished_before_the_container_is_seen_to_have_ended(world: World) -> None:
    _, container = world.running()
    world.journal.calls.clear()
    world.stop(container)
    last = ["consoles.finish", "records.containers.replace", "cgroups.remove", "disks.delete"]
    assert world.journal.calls[-4:] == last


def test_stopping_twice_is_no_error_and_keeps_the_first_end(world: World) -> None:
    _, container = world.running()
    world.stop(container, 30)
    first = exit_of(world, container)
    world.stop(container, 0)
    assert exit_of(world, container) == first


def test_a_container_that_never_ran_is_left_as_it_is(world: World) -> None:
    container = world.create(world.run())
    world.stop(container)
    assert world.container(container).phase is ContainerPhase.CREATED


def test_a_container_removed_meanwhile_is_no_error(world: World) -> None:
    _, container = world.running()
    record = world.container(container)
    world.remove(container)
    world.do.stop_container.stop(record, 30)


def test_a_stop_that_failed_can_be_repeated(world: World) -> None:
    _, container = world.running()
    world.outside.vms.shuts_down_after = None
    world.journal.fail("vms.destroy", Unavailable("libvirt is gone"))
    with pytest.raises(Unavailable):
        world.stop(container)
    assert world.container(container).phase is ContainerPhase.RUNNING
    world.stop(container)
    assert exit_of(world, container).code == 137


def test_a_vm_that_survives_its_destruction_is_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _, container = world.running()
    monkeypatch.setattr(world.outside.vms, "destroy", lambda domain, container: None)
    world.outside.vms.shuts_down_after = None
    with pytest.raises(InternalError, match="still running"):
        world.stop(container)


def test_a_console_that_cannot_be_written_does_not_keep_the_container_running(world: World) -> None:
    _, container = world.running()
    world.journal.fail("consoles.open", ResourceExhausted("disk full"))
    world.journal.fail("consoles.finish", ResourceExhausted("disk full"))
    world.stop(container, 30)
    assert exit_of(world, container).code == 143


# --- overlapping calls


def waiting_stop(world: World, container: ContainerId, grace: float) -> Background:
    """A stop that waits for a deaf guest on the held clock."""
    world.outside.clock.held = True
    world.outside.vms.shuts_down_after = None
    stop = Background(lambda: world.stop(container, grace))
    world.outside.clock.until_waiting()
    return stop


def test_a_shorter_grace_counts_from_the_later_call(world: World) -> None:
    _, container = world.running()
    first = waiting_stop(world, container, 3600)
    world.outside.clock.advance(3)
    second = Background(lambda: world.stop(container, 2))

    def ended() -> bool:
        world.outside.clock.advance(1)
        return world.container(container).phase is ContainerPhase.EXITED

    wait_until(ended, 60, "the shorter grace is over")
    first.done()
    second.done()
    assert "within 2 s" in exit_of(world, container).message


def test_a_later_stop_with_a_longer_grace_does_not_lengthen_the_first(world: World) -> None:
    _, container = world.running()
    first = waiting_stop(world, container, 4)
    second = Background(lambda: world.stop(container, 3600))
    world.outside.clock.advance(4)
    first.done()
    second.done()
    assert "within 4 s" in exit_of(world, container).message


def test_a_stop_that_joined_a_failing_one_fails_too(world: World) -> None:
    _, container = world.running()
    first = waiting_stop(world, container, 3600)
    world.journal.fail("vms.destroy", Unavailable("libvirt is gone"))
    with pytest.raises(Unavailable):
        world.stop(container, 0)
    with pytest.raises(Unavailable):
        first.done()
    assert world.container(container).phase is ContainerPhase.RUNNING


def test_a_power_event_ends_the_wait(world: World) -> None:
    _, container = world.running()
    stop = waiting_stop(world, container, 3600)
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    stop.done()
    assert exit_of(world, container).code == 143


def test_an_event_that_ends_nothing_does_not_end_the_wait(world: World) -> None:
    _, container = world.running()
    stop = waiting_stop(world, container, 3600)
    world.outside.vms.halt(world.domain(container))  # its disk is full: an event, and it is still there
    world.outside.clock.until_waiting()
    assert world.container(container).phase is ContainerPhase.RUNNING
    world.stop(container, 0)
    stop.done()


def test_removal_of_the_container_ends_a_waiting_stop(world: World) -> None:
    sandbox, container = world.running()
    stop = waiting_stop(world, container, 3600)
    removal = Background(lambda: world.remove(container))
    removal.done()
    stop.done()
    world.remove_sandbox(sandbox)
    assert world.everything() == []


def test_stopping_the_pod_ends_a_waiting_stop(world: World) -> None:
    sandbox, container = world.running()
    stop = waiting_stop(world, container, 3600)
    Background(lambda: world.stop_sandbox(sandbox)).done()
    stop.done()
    assert exit_of(world, container).code == 137


def test_removing_the_pod_ends_a_waiting_stop(world: World) -> None:
    sandbox, container = world.running()
    stop = waiting_stop(world, container, 3600)
    Background(lambda: world.remove_sandbox(sandbox)).done()
    stop.done()
    assert world.everything() == []


def test_a_waiting_stop_does_not_hold_up_other_pods(world: World) -> None:
    _, container = world.running("one")
    stop = waiting_stop(world, container, 3600)
    sandbox, other = world.running("two")
    world.stop(other, 0)
    world.remove_sandbox(sandbox)
    world.stop(container, 0)
    stop.done()


TERMINATION = container_config(
    mounts=(Mount("/last", "/pods/uid/containers/vm/7f"),),
    annotations={"io.kubernetes.container.terminationMessagePath": "/last"},
)


def test_the_termination_message_is_read_before_the_power_button_is_pressed(world: World) -> None:
    world.outside.guests.files["/last"] = b"saved all"
    container = world.create(world.run(), config=TERMINATION)
    world.start(container)
    world.stop(container, 30)
    assert world.outside.termination_files.written == {"/pods/uid/containers/vm/7f": b"saved all"}
    calls = world.journal.calls
    assert calls.index("guest_operations.read_tail") < calls.index("vms.ask_to_shut_down")


def test_a_stop_without_grace_does_not_wait_for_the_termination_message(world: World) -> None:
    world.outside.guests.files["/last"] = b"saved all"
    container = world.create(world.run(), config=TERMINATION)
    world.start(container)
    world.stop(container, 0)
    assert world.journal.count("guest_operations.read_tail") == 0
