"""A checkpoint freezes file systems, always thaws them, sets the clock, and waits for no guest."""

import json

import pytest
from fakes.background import Background
from fakes.journal import Crash, When
from fakes.waiting import eventually
from fakes.world import World

from virtshim.model.deadline import Deadline
from virtshim.model.errors import DeadlineExceeded, InternalError, ResourceExhausted, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import PauseReason, Power

PLACE = "/checkpoints/one.tar"


def checkpoint(world: World, container: ContainerId, location: str = PLACE) -> None:
    deadline = Deadline.after(world.outside.clock.monotonic(), 1e9)
    world.do.checkpoint_container.checkpoint(world.container(container), location, deadline)


def moves_again(world: World, container: ContainerId) -> bool:
    return not world.outside.guests.frozen and not world.container(container).status.frozen


def test_the_disk_is_copied_while_file_systems_are_frozen_and_the_archive_says_so(world: World) -> None:
    _, container = world.running()
    copied = world.journal.hold("archives.copy")
    work = Background(lambda: checkpoint(world, container))
    copied.wait()
    assert world.outside.guests.frozen == {container}
    assert world.container(container).status.frozen
    copied.open()
    work.done()
    eventually(lambda: moves_again(world, container))
    assert json.loads(world.outside.archives.finished[PLACE])["frozenFileSystems"] == 2


def test_the_guests_clock_is_set_after_the_resume(world: World) -> None:
    _, container = world.running()
    checkpoint(world, container)
    eventually(lambda: world.outside.guests.clocks_set == [container])
    calls = world.journal.calls
    assert calls.index("vms.resume") < calls.index("guest_operations.thaw") < calls.index("guest_operations.set_clock")


@pytest.mark.parametrize("why", [WrongState("no guest agent answers"), DeadlineExceeded("slow"), InternalError("no")])
def test_a_guest_that_cannot_freeze_is_checkpointed_unfrozen(world: World, why: Exception) -> None:
    _, container = world.running()
    world.journal.fail("guest_operations.freeze", why)
    checkpoint(world, container)
    assert json.loads(world.outside.archives.finished[PLACE])["frozenFileSystems"] == 0
    eventually(lambda: moves_again(world, container))


def test_a_freeze_whose_answer_came_too_late_is_thawed(world: World) -> None:
    _, container = world.running()
    world.journal.fail("guest_operations.freeze", DeadlineExceeded("slow"), after=True)
    checkpoint(world, container)
    eventually(lambda: moves_again(world, container))


@pytest.mark.parametrize("call", ["vms.pause", "vms.save_memory", "archives.copy", "archives.finish"])
def test_after_a_failed_checkpoint_the_guest_is_thawed(world: World, call: str) -> None:
    _, container = world.running()
    world.journal.fail(call, ResourceExhausted("the disk is full"))
    with pytest.raises(ResourceExhausted):
        checkpoint(world, container)
    eventually(lambda: moves_again(world, container))


def test_a_thaw_is_repeated_until_the_guest_answers(world: World) -> None:
    _, container = world.running()
    world.journal.fail("guest_operations.thaw", Unavailable("the connection to the guest agent broke"), times=5)
    checkpoint(world, container)
    eventually(lambda: moves_again(world, container))
    assert world.journal.count("guest_operations.thaw") == 6


def test_no_call_waits_for_the_thaw(world: World) -> None:
    _, container = world.running()
    gate = world.journal.hold("guest_operations.thaw")
    checkpoint(world, container)
    assert PLACE in world.outside.archives.finished
    gate.wait()
    gate.open()
    eventually(lambda: moves_again(world, container))


def test_the_thaw_of_a_guest_that_has_ended_is_not_repeated(world: World) -> None:
    _, container = world.running()
    world.journal.fail("guest_operations.thaw", Unavailable("the VM has ended"), times=1000)
    checkpoint(world, container)
    world.stop(container)
    eventually(lambda: not world.app.freezer.is_thawing(container))


# A process that dies takes its threads along.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
@pytest.mark.parametrize("call", ["guest_operations.freeze", "vms.pause", "vms.save_memory", "vms.resume"])
def test_after_a_crash_at_any_step_the_next_start_thaws_the_guest(world: World, call: str, when: When) -> None:
    _, container = world.running()
    checkpoint(world, container)
    eventually(lambda: not world.app.freezer.is_thawing(container))
    steps = world.journal.calls
    at = steps[steps.index("archives.begin") - 1 :].index(call) + 1
    world.journal.crash(at, when)
    with pytest.raises(Crash):
        checkpoint(world, container, "/checkpoints/two.tar")
    world = world.recovered()
    eventually(lambda: moves_again(world, container))
    assert world.outside.vms.power(world.domain(container)).power is Power.RUNNING
    world.close()


def test_the_clock_is_set_when_a_vm_resumes_after_a_full_disk(world: World) -> None:
    _, container = world.running()
    world.outside.vms.halt(world.domain(container), PauseReason.IO_ERROR)
    world.app.watch.look()
    eventually(lambda: world.outside.guests.clocks_set == [container])
