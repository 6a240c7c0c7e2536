"""StopContainer of a container with a command signals the command, waits for its end, and then ends the guest."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fakes.background import Background
from fakes.world import LOG_DIRECTORY, World, container_config
from podclient import wait_until

from virtshim.guest.command import EntrypointProgress, OutputPosition, StreamPosition, stop_signal_of
from virtshim.model.container import Container, ContainerPhase, Exit, ExitReason, Mount
from virtshim.model.errors import DeadlineExceeded, InternalError
from virtshim.model.ids import ContainerId
from virtshim.model.image import ImageConfig
from virtshim.model.vm import OffReason
from virtshim.streaming.ports import Output, OutStream

LOG = f"{LOG_DIRECTORY}/vm/0.log"


def last(text: str, code: int) -> EntrypointProgress:
    """What a command says and how it ends."""
    over = OutputPosition(StreamPosition(1, 0, over=True), StreamPosition(0, 0, over=True))
    return EntrypointProgress((Output(OutStream.STDOUT, text.encode()),), over, code=code)


def begun(world: World, **changes: Any) -> ContainerId:
    """Its command runs, and stands still with the clock."""
    container = world.create(world.run(), config=container_config(**{"command": ("/bin/server",)} | changes))
    world.start(container)
    wait_until(lambda: world.container(container).status.command_begun, 60, "the command is begun")
    world.outside.clock.held = True
    return container


def exit_of(world: World, container: ContainerId) -> Exit:
    record = world.container(container)
    assert record.phase is ContainerPhase.EXITED
    assert record.exit is not None
    return record.exit


def waiting(world: World, container: ContainerId, grace: float) -> Background:
    """A stop that waits for the command, as the one who follows the command does."""
    stop = Background(lambda: world.stop(container, grace))
    world.outside.clock.until_waiting(2)
    return stop


def test_a_command_gets_the_stop_signal_and_its_last_output_and_exit_code_are_kept(world: World) -> None:
    guests = world.outside.guests
    container = begun(world)
    stop = waiting(world, container, 30)
    assert (guests.signals, world.outside.vms.pressed) == ([15], []), "the guest is not told yet"
    guests.tell(0, last("bye\n", 3))
    world.outside.clock.advance(1)
    stop.done()
    how = exit_of(world, container)
    assert (how.code, how.reason, how.message) == (3, ExitReason.ERROR, "")
    assert world.outside.entrypoint_logs.logs[LOG] == ["stdout bye\n"]
    assert len(world.outside.vms.pressed) == 1
    assert world.journal.count("vms.destroy") == 0


def test_a_command_that_exits_with_0_on_its_stop_signal_is_completed(world: World) -> None:
    container = begun(world)
    stop = waiting(world, container, 30)
    world.outside.guests.tell(0, last("", 0))
    world.outside.clock.advance(1)
    stop.done()
    assert (exit_of(world, container).code, exit_of(world, container).reason) == (0, ExitReason.COMPLETED)


def test_the_guests_shutdown_gets_the_rest_of_the_grace_period(world: World) -> None:
    world.outside.vms.shuts_down_after = None
    guests = world.outside.guests
    container = begun(world)
    stop = waiting(world, container, 100)
    world.outside.clock.advance(1)
    world.outside.clock.until_waiting(2)
    guests.tell(0, last("", 5))
    world.outside.clock.advance(1)
    wait_until(lambda: world.outside.vms.pressed, 60, "the guest is told")
    for _ in range(97):
        world.outside.clock.until_waiting()
        world.outside.clock.advance(1)
    assert world.container(container).is_running, "more than a guest gets whose command has ended by itself"
    world.outside.clock.until_waiting()
    world.outside.clock.advance(1)
    stop.done()
    assert exit_of(world, container).code == 5, "the guest was killed, the command was not"


@pytest.mark.parametrize(
    ("asked", "number"),
    [(0, 15), (1, 6), (8, 1), (10, 2), (13, 9), (18, 3), (23, 15), (29, 10), (34, 25), (35, 34), (38, 37), (65, 64), (66, 15)],
)  # fmt: skip
def test_kubelets_stop_signals_become_linux_signal_numbers(world: World, asked: int, number: int) -> None:
    """The enum Signal of CRI: SIGABRT is 1, SIGHUP 8, SIGINT 10, SIGUSR1 29, SIGRTMINPLUS3 38 ..."""
    container = world.create(world.run(), config=container_config(command=("/bin/server",), stop_signal=asked))
    assert stop_signal_of(world.container(container)) == number


@pytest.mark.parametrize(
    ("said", "asked", "number"),
    [("SIGQUIT", 0, 3), ("SIGRTMIN+3", 0, 37), ("SIGRTMAX-2", 0, 62), ("SIGRTMIN", 0, 34), ("SIGQUIT", 29, 10), ("", 0, 15)],
)  # fmt: skip
def test_the_images_stop_signal_counts_if_the_pod_has_none(world: World, said: str, asked: int, number: int) -> None:
    container = world.container(world.create(world.run(), config=container_config(stop_signal=asked)))
    spec = dataclasses.replace(container.spec, image_config=ImageConfig(stop_signal=said))
    assert stop_signal_of(dataclasses.replace(container, spec=spec)) == number


def test_a_command_that_does_not_end_is_killed_with_its_guest_after_the_grace_period(world: World) -> None:
    container = begun(world)
    world.outside.clock.held = False
    before = world.outside.clock.monotonic()
    world.stop(container, 30)
    assert round(world.outside.clock.monotonic() - before, 6) >= 30
    how = exit_of(world, container)
    assert (how.code, how.reason) == (137, ExitReason.ERROR)
    assert "command did not end within 30 s" in how.message
    assert world.outside.vms.pressed == [], "it had all of the time"


def test_without_a_grace_period_neither_command_nor_guest_is_signalled(world: World) -> None:
    container = begun(world)
    world.stop(container, 0)
    assert (world.outside.guests.signals, world.outside.vms.pressed) == ([], [])
    assert exit_of(world, container).message == "killed: no grace period"


@pytest.mark.parametrize("error", [DeadlineExceeded("no answer"), InternalError("nonsense")])
def test_the_power_button_is_pressed_if_the_agent_does_not_answer(world: World, error: Exception) -> None:
    container = begun(world)
    world.outside.guests.signal_error = error  # type: ignore[assignment]
    world.stop(container, 30)
    assert len(world.outside.vms.pressed) == 1
    assert exit_of(world, container).code == 143


def test_a_stop_waits_for_a_lost_command_only_until_the_next_look(world: World) -> None:
    container = begun(world)
    world.outside.guests.still_there = False
    stop = waiting(world, container, 300)
    world.outside.clock.advance(5)
    stop.done()
    assert len(world.outside.vms.pressed) == 1
    assert exit_of(world, container).code == 143


def test_a_stop_keeps_a_pending_command_from_starting(world: World) -> None:
    guests = world.outside.guests
    guests.begin_error = DeadlineExceeded("timed out waiting for the guest agent")
    world.outside.clock.held = True
    container = world.create(world.run(), config=container_config(command=("/bin/server",)))
    world.start(container)
    world.outside.clock.until_waiting()
    world.records.containers.replace(world.container(container).asked_to_stop())
    guests.begin_error = None  # the agent is up now
    world.outside.clock.advance(2)
    world.outside.clock.until_waiting()
    assert guests.begun == {}


def test_overlapping_stops_signal_once_and_the_shorter_grace_wins(world: World) -> None:
    container = begun(world)
    first = waiting(world, container, 3600)
    second = Background(lambda: world.stop(container, 3600))
    world.outside.clock.until_waiting(2)
    assert world.outside.guests.signals == [15]
    world.stop(container, 0)
    first.done()
    second.done()
    assert exit_of(world, container).message == "killed: no grace period"


def test_a_repeated_stop_does_not_lose_an_exit_code_that_is_not_recorded_yet(world: World) -> None:
    """The command is gone, and whoever follows it has not looked yet."""
    container = begun(world)
    first = waiting(world, container, 30)
    world.outside.guests.still_there = False
    again = Background(lambda: world.stop(container, 30))
    world.outside.clock.until_waiting(2)
    assert world.outside.vms.pressed == []
    world.outside.guests.tell(0, last("", 7))
    world.outside.clock.advance(1)
    first.done()
    again.done()
    assert exit_of(world, container).code == 7


def test_the_termination_message_is_read_after_the_command_has_ended(world: World) -> None:
    guests = world.outside.guests
    container = begun(
        world,
        mounts=(Mount("/last", "/pods/uid/containers/vm/7f"),),
        annotations={"io.kubernetes.container.terminationMessagePath": "/last"},
    )
    stop = waiting(world, container, 30)
    guests.files["/last"] = b"told to end"
    guests.tell(0, last("", 1))
    world.outside.clock.advance(1)
    stop.done()
    assert world.outside.termination_files.written == {"/pods/uid/containers/vm/7f": b"told to end"}


def stopped_on_disk(world: World, container: ContainerId) -> Container:
    """As a virtshim that was killed after the signal leaves it."""
    world.records.containers.replace(world.container(container).asked_to_stop())
    world.outside.clock.held = False
    return world.container(container)


def test_a_kill_of_virtshim_during_a_stop_loses_no_exit_code(world: World) -> None:
    container = begun(world)
    stopped_on_disk(world, container)
    world.outside.guests.tell(0, last("bye\n", 4))
    after = world.recovered()
    wait_until(lambda: not after.container(container).is_running, 60, "the end")
    assert exit_of(after, container).code == 4
    after.close()


def test_a_stop_interrupted_by_a_kill_of_virtshim_continues_when_repeated(world: World) -> None:
    container = begun(world)
    stopped_on_disk(world, container)
    after = world.recovered()
    assert after.container(container).is_running
    after.outside.guests.signal_error = InternalError("no agent any more")
    after.stop(container, 30)
    assert exit_of(after, container).code == 143
    after.close()


def test_a_guest_that_went_off_while_virtshim_was_down_counts_as_interrupted(world: World) -> None:
    container = begun(world)
    stopped_on_disk(world, container)
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    after = world.recovered()
    how = exit_of(after, container)
    assert (how.code, how.reason) == (143, ExitReason.ERROR)
    after.close()
