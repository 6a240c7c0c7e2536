"""How a container ended: the table, and the one place that writes it."""

import uuid

import pytest
from fakes.world import World

from virtshim.domain.container import ContainerPhase, ExitReason
from virtshim.domain.errors import Unavailable
from virtshim.domain.ids import ContainerId
from virtshim.domain.vm import OffReason, Power, PowerState
from virtshim.services.exits import exit_of

OFF = Power.OFF


@pytest.mark.parametrize(
    ("state", "code", "reason", "says"),
    [
        (PowerState(OFF, OffReason.SHUTDOWN), 0, ExitReason.COMPLETED, ""),
        (PowerState(OFF, OffReason.CRASHED), 1, ExitReason.ERROR, "kernel panic"),
        (PowerState(Power.CRASHED, OffReason.CRASHED), 1, ExitReason.ERROR, "kernel panic"),
        (PowerState(OFF, OffReason.DESTROYED), 137, ExitReason.ERROR, "from outside"),
        (PowerState(OFF, OffReason.FAILED), 137, ExitReason.ERROR, "QEMU ended unexpectedly"),
        (PowerState(OFF, OffReason.UNKNOWN), 255, ExitReason.UNKNOWN, "nobody knows how"),
        (PowerState(Power.ABSENT), 255, ExitReason.UNKNOWN, "gone from libvirt"),
    ],
)
def test_the_way_a_vm_went_off_decides_code_and_reason(
    state: PowerState, code: int, reason: ExitReason, says: str
) -> None:
    ended = exit_of(state, 17)
    assert (ended.code, ended.reason, ended.finished_at) == (code, reason, 17)
    assert says in ended.message


@pytest.mark.parametrize("reason", list(OffReason))
@pytest.mark.parametrize("power", [Power.OFF, Power.CRASHED, Power.ABSENT])
def test_there_is_an_answer_for_every_way_of_being_off(power: Power, reason: OffReason) -> None:
    ended = exit_of(PowerState(power, reason), 1)
    assert (ended.code == 0) == (ended.reason is ExitReason.COMPLETED)


def test_what_we_did_ourselves_is_told_instead_of_the_guess() -> None:
    assert exit_of(PowerState(OFF, OffReason.DESTROYED), 1, "killed: no grace period").message == (
        "killed: no grace period"
    )


def test_a_container_whose_vm_is_on_is_not_settled(world: World) -> None:
    _, container = world.running()
    settled = world.app.events.exits.settle(container)
    assert settled is not None
    assert settled.phase is ContainerPhase.RUNNING


def test_a_container_that_is_gone_settles_to_nothing(world: World) -> None:
    assert world.app.events.exits.settle(ContainerId("1" * 64)) is None


def test_an_unreadable_state_is_no_end(world: World) -> None:
    _, container = world.running()
    world.journal.fail("vms.power", Unavailable("libvirt is gone"))
    with pytest.raises(Unavailable):
        world.app.events.exits.settle(container)
    assert world.container(container).phase is ContainerPhase.RUNNING


# --- power events


@pytest.mark.parametrize(("reason", "code"), [(OffReason.SHUTDOWN, 0), (OffReason.CRASHED, 1), (OffReason.FAILED, 137)])
def test_a_vm_that_ends_by_itself_is_recorded_by_its_event(world: World, reason: OffReason, code: int) -> None:
    _, container = world.running()
    world.outside.vms.end(world.domain(container), reason)
    world.outside.vms.deliver()
    ended = world.container(container)
    assert ended.exit is not None
    assert ended.exit.code == code
    assert world.outside.consoles.following == {}


def test_an_event_is_a_hint_and_the_state_decides(world: World) -> None:
    _, container = world.running()
    world.app.events.changed(world.domain(container))
    assert world.container(container).phase is ContainerPhase.RUNNING


def test_an_event_of_a_foreign_domain_changes_and_asks_nothing(world: World) -> None:
    world.running()
    world.journal.calls.clear()
    world.app.events.changed(uuid.uuid4())
    assert world.journal.calls == []


def test_an_event_that_cannot_be_followed_up_does_not_end_the_event_thread(world: World) -> None:
    _, container = world.running()
    world.outside.vms.deliver()
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.journal.fail("vms.power", Unavailable("libvirt is gone"))
    world.outside.vms.deliver()
    assert world.container(container).phase is ContainerPhase.RUNNING
    world.app.events.changed(world.domain(container))
    assert world.container(container).phase is ContainerPhase.EXITED


def test_a_second_event_does_not_change_the_recorded_end(world: World) -> None:
    _, container = world.running()
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.outside.vms.deliver()
    first = world.container(container)
    world.outside.clock.advance(10)
    world.app.events.changed(world.domain(container))
    assert world.container(container) == first
