"""The beginning and the end of a running VM's trouble are in its container's log and in Events of its pod."""

from __future__ import annotations

import dataclasses

import pytest
from fakes.journal import Crash
from fakes.waiting import eventually
from fakes.world import World, container_config

from virtshim.guest.command import CommandResult
from virtshim.model.container import ExitReason, Mount
from virtshim.model.errors import ResourceExhausted
from virtshim.model.ids import ContainerId
from virtshim.model.troubles import TroubleKind
from virtshim.volumes.mount_script import NO_MODULE

READ_ONLY = container_config(mounts=(Mount("/texts", "/srv/texts", readonly=True),))
GONE = "stderr virtshim: volumes_gone: its volumes are gone: "
PAUSED = "stderr virtshim: paused: paused by virtshim pause; virtshim resume continues it"


def with_a_volume(world: World, *command: str) -> ContainerId:
    made = world.create(world.run(), config=container_config(mounts=READ_ONLY.mounts, command=command))
    world.start(made)
    world.app.watch.look()
    return made


def own_lines(world: World, made: ContainerId) -> list[str]:
    """What virtshim itself has written into the container's log."""
    container = world.container(made)
    logs = world.outside.entrypoint_logs if container.spec.command else world.outside.consoles
    return [line.rstrip("\n") for line in logs.logs[container.spec.log_file] if " virtshim: " in line]


def kinds(world: World, made: ContainerId) -> list[TroubleKind]:
    return [one.kind for one in world.container(made).status.troubles]


def pause(world: World, made: ContainerId) -> None:
    world.app.operator.services.actions.pause(world.container(made))
    world.app.watch.look()


def resume(world: World, made: ContainerId) -> None:
    world.app.operator.services.actions.resume(world.container(made))
    world.app.watch.look()


@pytest.mark.parametrize("command", [(), ("serve",)])
def test_the_log_gets_one_line_for_a_trouble_and_one_for_its_end(world: World, command: tuple[str, ...]) -> None:
    made = with_a_volume(world, *command)
    world.outside.shares.dead.add(made.short)
    for _ in range(3):
        world.app.watch.look()
    assert [line[: len(GONE)] for line in own_lines(world, made)] == [GONE]
    world.outside.shares.dead.clear()
    for _ in range(3):
        world.app.watch.look()
    assert own_lines(world, made)[1:] == ["stderr virtshim: volumes_gone is over"]


def test_a_pod_has_a_warning_when_it_begins_and_a_normal_event_when_it_is_over(world: World) -> None:
    made = with_a_volume(world)
    pause(world, made)
    resume(world, made)
    begun, over = world.outside.pod_events.told
    assert begun.pod == over.pod == world.sandbox(world.container(made).sandbox_id).key
    assert (begun.reason, begun.is_warning) == ("Paused", True)
    assert begun.message == "container vm: paused by virtshim pause; virtshim resume continues it"
    assert (over.reason, over.is_warning) == ("TroubleOver", False)
    assert over.message.startswith("container vm: Paused is over: ")


def test_the_end_of_one_trouble_does_not_end_another(world: World) -> None:
    made = with_a_volume(world)
    world.outside.shares.dead.add(made.short)
    pause(world, made)
    assert kinds(world, made) == [TroubleKind.PAUSED, TroubleKind.VOLUMES_GONE]
    resume(world, made)
    assert kinds(world, made) == [TroubleKind.VOLUMES_GONE]
    assert own_lines(world, made)[2:] == ["stderr virtshim: paused is over"]


def test_a_stop_that_resumes_a_paused_guest_reports_the_end_of_the_pause(world: World) -> None:
    made = with_a_volume(world)
    pause(world, made)
    world.stop(made, 10)
    assert own_lines(world, made) == [PAUSED, "stderr virtshim: paused is over"]


@pytest.mark.parametrize("is_over", [True, False])
def test_a_restarted_virtshim_does_not_repeat_a_trouble_but_reports_its_end(world: World, is_over: bool) -> None:
    world.outside.guests.do = lambda command, timeout, cancelled: CommandResult(NO_MODULE, b"", b"no virtiofs")
    made = with_a_volume(world)
    eventually(lambda: world.app.watch.look() or kinds(world, made))
    before = own_lines(world, made)
    if is_over:
        world.outside.guests.do = lambda command, timeout, cancelled: CommandResult(0, b"", b"")
    again = world.restarted()
    try:
        again.app.watch.look()  # before it has heard anything of the guest
        assert own_lines(again, made) == before
        again.app.recovery.recover.run(rebooted=False)
        eventually(lambda: again.app.watch.look() or bool(kinds(again, made)) != is_over)
        assert own_lines(again, made)[1:] == (["stderr virtshim: volumes_not_mounted is over"] if is_over else [])
    finally:
        again.close()


def test_an_unwritable_log_gets_its_line_later_and_delays_nothing_else(world: World) -> None:
    made = with_a_volume(world)
    world.journal.fail("consoles.note", ResourceExhausted("No space left on device"), times=2)
    pause(world, made)
    assert kinds(world, made) == [TroubleKind.PAUSED]
    assert own_lines(world, made) == []
    assert [one.reason for one in world.outside.pod_events.told] == ["Paused"]
    for _ in range(3):
        world.app.watch.look()
    assert own_lines(world, made) == [PAUSED]
    assert len(world.outside.pod_events.told) == 1


def test_a_trouble_that_ended_before_the_log_was_writable_is_not_logged(world: World) -> None:
    made = with_a_volume(world)
    world.journal.fail("consoles.note", ResourceExhausted("No space left on device"))
    pause(world, made)
    resume(world, made)
    assert own_lines(world, made) == []
    assert kinds(world, made) == []


def test_a_trouble_that_was_not_recorded_yet_survives_a_crash(world: World) -> None:
    made = with_a_volume(world)
    world.app.operator.services.actions.pause(world.container(made))
    world.journal.on_call = lambda name: world.journal.crash(1) if name == "consoles.note" else None
    with pytest.raises(Crash):
        world.app.watch.look()
    again = world.recovered()
    try:
        again.journal.on_call = lambda _: None
        again.app.watch.look()
        assert kinds(again, made) == [TroubleKind.PAUSED]
        assert own_lines(again, made) == [PAUSED]
    finally:
        again.close()


def test_a_command_that_cannot_begin_without_its_volumes_has_the_reason_in_its_log(world: World) -> None:
    world.outside.guests.do = lambda command, timeout, cancelled: CommandResult(NO_MODULE, b"", b"no virtiofs")
    made = with_a_volume(world, "serve")
    eventually(lambda: world.container(made).exit)
    how = world.container(made).exit
    assert how is not None
    assert how.reason is ExitReason.START_ERROR
    assert made not in world.outside.guests.begun
    (line,) = own_lines(world, made)
    assert line.startswith(
        "stderr virtshim: volumes_not_mounted: the volumes cannot be mounted in the guest: no virtiofs"
    )


def test_a_guests_words_become_one_line_of_limited_length(world: World) -> None:
    said = b"first\nsecond\r\x1b[2J" + b"x" * 10_000
    world.outside.guests.do = lambda command, timeout, cancelled: CommandResult(NO_MODULE, b"", said)
    made = with_a_volume(world)
    eventually(lambda: world.app.watch.look() or kinds(world, made))
    (line,) = own_lines(world, made)
    assert "first; second" in line
    assert line.isprintable()
    assert len(line) < 1000
    assert len(world.outside.pod_events.told[0].message) <= 1024


def test_a_trouble_recorded_by_an_earlier_version_ends_with_its_cause(world: World) -> None:
    """It recorded no kinds."""
    made = with_a_volume(world)
    found = world.container(made)
    status = dataclasses.replace(found.status, trouble="its guest has suspended itself")
    world.records.containers.replace(dataclasses.replace(found, status=status))
    world.app.watch.look()
    assert world.container(made).status.trouble == ""


def test_each_kind_of_trouble_has_its_own_reason() -> None:
    assert len({kind.reason for kind in TroubleKind}) == len(TroubleKind)
    assert TroubleKind.VOLUMES_NOT_MOUNTED.reason == "VolumesNotMounted"
