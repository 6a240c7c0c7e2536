"""A checkpoint holds memory and disk of one moment, the VM continues, and a failure leaves nothing."""

import json

import pytest
from fakes.background import Background
from fakes.journal import Crash, When
from fakes.world import World

from virtshim.model.container import ContainerPhase
from virtshim.model.deadline import Deadline
from virtshim.model.errors import Aborted, DeadlineExceeded, InvalidRequest, ResourceExhausted, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason, PauseReason, Power

PLACE = "/checkpoints/one.tar"


def checkpoint(world: World, container: ContainerId, location: str = PLACE, seconds: float = 60.0) -> None:
    deadline = Deadline.after(world.outside.clock.monotonic(), seconds)
    world.do.checkpoint_container.checkpoint(world.container(container), location, deadline)


def runs(world: World, container: ContainerId) -> bool:
    return world.outside.vms.power(world.domain(container)).power is Power.RUNNING


def nothing_left(world: World, container: ContainerId) -> bool:
    archives = world.outside.archives
    return not (archives.files or archives.directories or world.container(container).status.checkpointing)


def test_memory_and_disk_are_of_one_moment_and_the_vm_runs_on(world: World) -> None:
    sandbox, container = world.running()
    world.journal.calls.clear()
    checkpoint(world, container)
    steps = [
        call
        for call in world.journal.calls
        if call.split(".")[0] in ("vms", "archives") or call == "guest_operations.freeze"
    ]
    assert steps == [
        "archives.begin",
        "guest_operations.freeze",
        "vms.pause",
        "vms.save_memory",
        "archives.copy",
        "vms.resume",
        "archives.copy",
        "archives.finish",
        "archives.discard",
    ]
    assert runs(world, container)
    assert nothing_left(world, container)
    manifest = json.loads(world.outside.archives.finished[PLACE])
    assert manifest["container"] == {"id": container.value, "name": "vm", "attempt": 0}
    assert manifest["pod"]["uid"] == world.sandbox(sandbox).key.uid
    assert manifest["image"]["digest"] == world.container(container).image.value


def test_a_second_checkpoint_after_the_first_succeeds(world: World) -> None:
    _, container = world.running()
    checkpoint(world, container)
    checkpoint(world, container, "/checkpoints/two.tar")
    assert set(world.outside.archives.finished) == {PLACE, "/checkpoints/two.tar"}


def test_only_a_running_container_can_be_checkpointed(world: World) -> None:
    container = world.create(world.run())
    with pytest.raises(WrongState, match="created"):
        checkpoint(world, container)
    world.start(container)
    world.stop(container)
    with pytest.raises(WrongState, match="exited"):
        checkpoint(world, container)
    assert nothing_left(world, container)


@pytest.mark.parametrize("why", list(PauseReason))
def test_a_vm_paused_for_another_reason_is_refused_and_stays_paused(world: World, why: PauseReason) -> None:
    _, container = world.running()
    world.outside.vms.halt(world.domain(container), why)
    with pytest.raises(WrongState):
        checkpoint(world, container)
    assert world.outside.vms.power(world.domain(container)).pause is why
    assert nothing_left(world, container)


def test_an_impossible_archive_path_is_refused_before_the_vm_is_paused(world: World) -> None:
    _, container = world.running()
    with pytest.raises(InvalidRequest):
        checkpoint(world, container, "relative.tar")
    assert world.journal.count("vms.pause") == 0
    assert nothing_left(world, container)


@pytest.mark.parametrize("call", ["vms.save_memory", "archives.copy", "archives.finish"])
def test_after_a_failure_the_vm_runs_on_and_nothing_is_left(world: World, call: str) -> None:
    _, container = world.running()
    world.journal.fail(call, ResourceExhausted("the disk is full"))
    with pytest.raises(ResourceExhausted):
        checkpoint(world, container)
    assert runs(world, container)
    assert nothing_left(world, container)
    assert world.outside.archives.finished == {}
    checkpoint(world, container)


def test_an_expired_deadline_ends_a_checkpoint(world: World) -> None:
    _, container = world.running()
    with pytest.raises(DeadlineExceeded):
        checkpoint(world, container, seconds=0)
    assert runs(world, container)
    assert nothing_left(world, container)


def test_a_second_checkpoint_during_the_first_is_refused(world: World) -> None:
    _, container = world.running()
    gate = world.journal.hold("vms.save_memory")
    first = Background(lambda: checkpoint(world, container))
    gate.wait()
    with pytest.raises(Aborted, match="already"):
        checkpoint(world, container, "/checkpoints/two.tar")
    world.app.watch.look()  # the periodic look leaves it alone, and sees no trouble
    assert not runs(world, container)
    assert world.container(container).status.trouble == ""
    gate.open()
    first.done()
    assert set(world.outside.archives.finished) == {PLACE}
    assert runs(world, container)


def test_a_stop_need_not_wait_for_a_checkpoint(world: World) -> None:
    _, container = world.running()
    gate = world.journal.hold("vms.save_memory")
    first = Background(lambda: checkpoint(world, container))
    gate.wait()
    world.outside.vms.shuts_down_after = None
    world.stop(container, 0)
    assert world.container(container).phase is ContainerPhase.EXITED
    gate.open()
    with pytest.raises(Aborted):
        first.done()
    assert nothing_left(world, container)
    assert world.container(container).phase is ContainerPhase.EXITED


def test_a_container_removed_meanwhile_leaves_nothing(world: World) -> None:
    _, container = world.running()
    gate = world.journal.hold("vms.save_memory")
    first = Background(lambda: checkpoint(world, container))
    gate.wait()
    world.remove(container)
    gate.open()
    with pytest.raises(Aborted):
        first.done()
    assert world.outside.archives.directories == set()
    assert world.records.containers.get(container) is None


# A process that dies takes its threads along.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
@pytest.mark.parametrize("step", range(1, 13))
def test_after_a_crash_at_any_step_the_next_start_resumes_the_vm(world: World, step: int, when: When) -> None:
    _, container = world.running()
    world.journal.crash(step, when)
    with pytest.raises(Crash):
        checkpoint(world, container)
    world = world.recovered()
    assert runs(world, container)
    assert nothing_left(world, container)
    world.close()


def test_a_vm_that_could_not_be_resumed_is_resumed_by_the_next_look(world: World) -> None:
    _, container = world.running()
    world.journal.fail("vms.resume", Unavailable("libvirt is gone"), times=2)
    with pytest.raises(Unavailable):
        checkpoint(world, container)
    assert not runs(world, container)
    with pytest.raises(Aborted, match="not yet cleaned up"):
        checkpoint(world, container)
    world.app.watch.look()
    assert runs(world, container)
    assert nothing_left(world, container)


def test_a_vms_end_during_a_checkpoint_is_recorded(world: World) -> None:
    _, container = world.running()
    gate = world.journal.hold("vms.save_memory")
    first = Background(lambda: checkpoint(world, container))
    gate.wait()
    world.outside.vms.end(world.domain(container), OffReason.CRASHED)
    world.outside.vms.deliver()
    gate.open()
    with pytest.raises(Aborted):
        first.done()
    ended = world.container(container).exit
    assert ended is not None
    assert ended.code == 137
