"""A guest in which nothing but firmware has run is ended at once when its container is stopped."""

import pytest
from fakes.world import World

from virtshim.model.ids import ContainerId
from virtshim.model.usage import BlockUsage

READ_ONLY = BlockUsage("sda", reads=40)
WRITTEN = BlockUsage("sdb", reads=2, writes=1)


@pytest.fixture
def deaf(world: World) -> ContainerId:
    """A running container whose guest does not listen to its power button, and has shown no kernel."""
    _, container = world.running()
    world.outside.vms.shuts_down_after = None
    world.outside.boot_output.before_kernel.add(container)
    return container


def stopped(world: World, container: ContainerId, blocks: tuple[BlockUsage, ...] | None) -> tuple[float, str]:
    """Seconds that the stop took, and the message of the end."""
    world.outside.readings.hung = blocks is None
    world.outside.readings.blocks = blocks or ()
    before = world.outside.clock.monotonic()
    world.stop(container, 30)
    ended = world.container(container).exit
    assert ended is not None
    return world.outside.clock.monotonic() - before, ended.message


def test_a_guest_that_has_not_reached_its_kernel_is_ended_at_once(world: World, deaf: ContainerId) -> None:
    seconds, message = stopped(world, deaf, (READ_ONLY,))
    assert seconds == 0
    assert message == "killed: the guest had not begun to boot its kernel"
    assert world.outside.vms.pressed == []


def test_a_guest_that_shows_a_kernel_has_its_grace_period(world: World, deaf: ContainerId) -> None:
    world.outside.boot_output.before_kernel.clear()
    assert stopped(world, deaf, (READ_ONLY,))[0] == 30


def test_a_guest_that_has_written_to_a_disk_has_its_grace_period(world: World, deaf: ContainerId) -> None:
    assert stopped(world, deaf, (READ_ONLY, WRITTEN))[0] == 30


@pytest.mark.parametrize("blocks", [None, ()])
def test_a_guest_whose_progress_is_unknown_has_its_grace_period(
    world: World, deaf: ContainerId, blocks: tuple[BlockUsage, ...] | None
) -> None:
    assert stopped(world, deaf, blocks)[0] == 30


def test_a_guest_that_has_run_for_minutes_has_its_grace_period(world: World, deaf: ContainerId) -> None:
    world.outside.clock.advance(121)
    assert stopped(world, deaf, (READ_ONLY,))[0] == 30


def test_a_guest_has_its_grace_period_if_the_wall_clock_was_set_back(world: World, deaf: ContainerId) -> None:
    world.outside.clock.set_back(7200)
    assert stopped(world, deaf, (READ_ONLY,))[0] == 30


def test_a_guest_whose_command_was_begun_has_its_grace_period(world: World, deaf: ContainerId) -> None:
    record = world.container(deaf)
    world.records.containers.replace(record.with_command_begun())
    assert stopped(world, deaf, (READ_ONLY,))[0] == 30
