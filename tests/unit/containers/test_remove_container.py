"""RemoveContainer ends a running VM, may be repeated, and can finish a removal that failed."""

import pytest
from fakes.world import IMAGE, LOG_DIRECTORY, World

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import ResourceExhausted, Unavailable


def test_vm_disk_seed_and_record_are_removed_and_the_log_stays(world: World) -> None:
    sandbox = world.run()
    before = world.everything()
    container = world.create(sandbox)
    world.start(container)
    world.stop(container)
    world.remove(container)
    assert world.everything() == before
    assert f"{LOG_DIRECTORY}/vm/0.log" in world.outside.consoles.logs


def test_a_running_container_is_killed(world: World) -> None:
    _, container = world.running()
    world.remove(container)
    assert world.outside.vms.domains == {}
    assert world.outside.consoles.following == {}


def test_the_record_is_removed_last(world: World) -> None:
    _, container = world.running()
    world.journal.calls.clear()
    world.remove(container)
    assert world.journal.calls == [
        "records.containers.replace",
        "vms.destroy",
        "consoles.finish",
        "records.containers.replace",  # with its exit
        "vms.undefine",
        "cgroups.remove",
        "disks.delete",
        "records.containers.delete",
    ]


def test_removing_twice_is_no_error(world: World) -> None:
    container = world.container(world.create(world.run()))
    world.do.remove_container.remove(container)
    world.do.remove_container.remove(container)


STEPS = ["records.containers.replace", "vms.destroy", "vms.undefine", "disks.delete", "records.containers.delete"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_removal_that_failed_is_finished_by_the_next(world: World, step: str, after: bool) -> None:
    sandbox, container = world.running()
    world.journal.fail(step, Unavailable("not now"), after=after)
    with pytest.raises(Unavailable):
        world.remove(container)
    if world.records.containers.get(container) is not None:
        world.remove(container)
    world.remove_sandbox(sandbox)
    assert world.everything() == []


def test_a_container_whose_removal_failed_is_listed_but_cannot_start(world: World) -> None:
    container = world.create(world.run())
    world.journal.fail("disks.delete", Unavailable("busy"))
    with pytest.raises(Unavailable):
        world.remove(container)
    record = world.container(container)
    assert record.phase is ContainerPhase.REMOVING
    assert record.is_visible


def test_a_container_is_removed_even_if_its_log_cannot_be_written(world: World) -> None:
    """On a full disk removal is what makes room."""
    _, container = world.running()
    world.journal.fail("consoles.finish", ResourceExhausted("disk full"))
    world.remove(container)
    assert world.records.containers.all() == []


def test_removing_the_last_container_removes_the_file_of_a_removed_image(world: World) -> None:
    sandbox = world.run()
    one, two = world.create(sandbox, "one"), world.create(sandbox, "two")
    world.images.remove(IMAGE)
    world.remove(one)
    assert len(world.outside.files.files) == 1
    world.remove(two)
    assert world.outside.files.files == {}


def test_the_file_of_a_listed_image_stays(world: World) -> None:
    world.remove(world.create(world.run()))
    assert len(world.outside.files.files) == 1
