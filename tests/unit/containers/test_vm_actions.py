"""Pause, resume, reset, reboot, freeze and thaw work, and leave the container's life cycle right."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.journal import Crash, When
from fakes.world import World, container_config
from podclient import wait_until

from virtshim.containers.operate import VmActions
from virtshim.guest.operation import Action
from virtshim.model.container import ContainerPhase
from virtshim.model.errors import Aborted, InvalidRequest, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import PauseReason, Power

ACTIONS = ("pause", "resume", "reset", "reboot", "freeze", "thaw")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def actions(world: World) -> VmActions:
    return world.app.operator.services.actions


def do(world: World, action: str, container: ContainerId, *args: int) -> bool:
    return getattr(actions(world), action)(world.container(container), *args).changed


def power(world: World, container: ContainerId) -> Power:
    return world.outside.vms.power(world.domain(container)).power


def becomes(condition: Callable[[], bool]) -> None:
    wait_until(condition, 20, "the guest is thawed")


def test_a_paused_vm_is_a_running_container_that_says_why_and_stays_so(world: World) -> None:
    _, container = world.running()
    assert do(world, "pause", container)
    assert not do(world, "pause", container)
    world.deliver()
    world.app.watch.look()
    found = world.container(container)
    assert (found.phase, found.status.paused, power(world, container)) == (ContainerPhase.RUNNING, True, Power.PAUSED)
    assert "virtshim resume" in found.status.trouble
    assert do(world, "resume", container)
    assert not do(world, "resume", container)
    world.deliver()
    found = world.container(container)
    assert (found.status.paused, found.status.trouble, power(world, container)) == (False, "", Power.RUNNING)
    becomes(lambda: world.outside.guests.clocks_set == [container])
    assert [taken.action for taken in actions(world).log.since(0)] == [Action.PAUSE, Action.RESUME]


def test_a_vm_stays_paused_over_a_restart_of_virtshim(world: World) -> None:
    _, container = world.running()
    do(world, "pause", container)
    world = world.recovered()
    world.app.watch.look()
    assert (power(world, container), world.container(container).status.paused) == (Power.PAUSED, True)
    world.stop(container, 30)
    assert world.container(container).exit is not None
    world.close()


def test_a_stop_resumes_a_paused_vm_so_that_it_shuts_down(world: World) -> None:
    _, container = world.running()
    do(world, "pause", container)
    world.outside.vms.shuts_down_after = 3.0
    world.stop(container, 30)
    ended = world.container(container)
    assert ended.exit is not None
    assert (ended.exit.code, ended.status.paused) == (143, False), "by itself, not killed"


def test_without_a_grace_period_a_paused_vm_is_destroyed_without_a_resume(world: World) -> None:
    sandbox, container = world.running()
    do(world, "pause", container)
    world.stop_sandbox(sandbox)
    assert world.container(container).phase is ContainerPhase.EXITED
    assert "vms.resume" not in [call.split("(")[0] for call in world.journal.calls]


def test_commands_in_a_paused_vm_are_refused_at_once_and_fail_no_probe(world: World) -> None:
    _, container = world.running()
    do(world, "pause", container)
    with pytest.raises(WrongState, match="virtshim resume"):
        world.do.exec_command.run(world.container(container), ("true",), 1.0, threading.Event())


def test_commands_in_a_frozen_guest_are_refused_at_once_too(world: World) -> None:
    world.outside.clock.held = True
    _, container = world.running()
    do(world, "freeze", container)
    with pytest.raises(WrongState, match="virtshim thaw"):
        world.do.exec_command.run(world.container(container), ("true",), 1.0, threading.Event())
    do(world, "thaw", container)


def test_a_vm_resumed_by_somebody_else_is_no_longer_recorded_as_paused(world: World) -> None:
    _, container = world.running()
    do(world, "pause", container)
    world.outside.vms.resume(world.domain(container))
    world.deliver()
    assert (world.container(container).status.paused, world.container(container).status.trouble) == (False, "")


def test_resume_also_works_on_a_vm_paused_by_somebody_else(world: World) -> None:
    _, container = world.running()
    world.outside.vms.pause(world.domain(container))
    world.deliver()
    assert "externally" in world.container(container).status.trouble
    assert do(world, "resume", container)
    assert world.container(container).status.trouble == ""


def test_a_vm_halted_by_a_full_disk_and_then_paused_stays_paused(world: World) -> None:
    _, container = world.running()
    world.outside.vms.halt(world.domain(container), PauseReason.IO_ERROR)
    assert do(world, "pause", container)
    world.app.watch.look()
    assert power(world, container) is Power.PAUSED
    assert do(world, "resume", container)


def test_every_action_on_a_suspended_guest_says_to_wake_it_first(world: World) -> None:
    _, container = world.running()
    world.outside.vms.halt(world.domain(container), PauseReason.GUEST)
    for action in ACTIONS:
        with pytest.raises(WrongState, match="suspended itself; wake it") as refused:
            do(world, action, container)
        assert "`virtshim " not in str(refused.value), "none of these helps"


def test_a_pause_that_fails_leaves_no_record(world: World) -> None:
    _, container = world.running()
    before = world.container(container)
    world.journal.fail("vms.pause", Unavailable("libvirt is away"))
    with pytest.raises(Unavailable):
        do(world, "pause", container)
    assert world.container(container) == before


@pytest.mark.parametrize("action", ["pause", "resume"])
@pytest.mark.parametrize("when", list(When))
@pytest.mark.parametrize("step", [1, 2, 3])
def test_after_a_crash_at_any_step_record_and_vm_agree_after_the_next_start(
    world: World, action: str, when: When, step: int
) -> None:
    _, container = world.running()
    if action == "resume":
        do(world, "pause", container)
    world.journal.crash(step, when)
    with contextlib.suppress(Crash):
        do(world, action, container)
    world = world.recovered()
    world.app.watch.look()
    assert world.container(container).status.paused is (power(world, container) is Power.PAUSED)
    assert world.container(container).phase is ContainerPhase.RUNNING
    world.stop(container, 10)
    world.close()


def test_a_paused_vm_does_not_use_up_its_commands_time_to_begin(world: World) -> None:
    world.pull()
    container = world.create(world.run(), config=container_config(command=("job",)))
    clock = world.outside.clock
    clock.held = True
    world.outside.guests.begin_error = Unavailable("the guest boots")
    world.start(container)
    clock.until_waiting()
    do(world, "pause", container)
    clock.advance(10_000)
    clock.until_waiting()
    do(world, "resume", container)
    clock.advance(10)  # one more try, which fails as those before
    clock.until_waiting()
    assert world.container(container).status.ending is None
    world.outside.guests.begin_error = None
    clock.advance(10)
    becomes(lambda: container in world.outside.guests.begun)
    assert world.container(container).status.ending is None


def test_a_reset_and_a_reboot_reach_the_vm(world: World) -> None:
    _, container = world.running()
    assert do(world, "reset", container)
    assert do(world, "reboot", container)
    assert world.outside.vms.domains[world.domain(container)].boots == 2
    assert world.outside.guests.rebooted == [container]
    world.deliver()
    assert world.container(container).is_running


def test_a_container_with_a_command_is_not_restarted_with_its_guest(world: World) -> None:
    world.pull()
    container = world.create(world.run(), config=container_config(command=("job",)))
    world.start(container)
    for action in ("reset", "reboot"):
        with pytest.raises(WrongState, match="runs once"):
            do(world, action, container)


def test_a_frozen_guest_stays_frozen_until_it_is_thawed(world: World) -> None:
    world.outside.clock.held = True
    _, container = world.running()
    assert do(world, "freeze", container)
    assert not do(world, "freeze", container, 120)
    world.app.watch.look()
    assert container in world.outside.guests.frozen
    assert world.container(container).status.frozen
    assert do(world, "thaw", container)
    assert not do(world, "thaw", container)
    assert container not in world.outside.guests.frozen
    assert not world.container(container).status.frozen


def test_a_freeze_ends_when_its_time_limit_is_over(world: World) -> None:
    world.outside.clock.held = True
    _, container = world.running()
    do(world, "freeze", container, 30)
    world.outside.clock.until_waiting()
    assert world.container(container).status.frozen
    world.outside.clock.advance(31)
    becomes(lambda: not world.container(container).status.frozen)
    assert container not in world.outside.guests.frozen


def test_a_restart_of_virtshim_thaws_frozen_guests(world: World) -> None:
    world.outside.clock.held = True
    _, container = world.running()
    do(world, "freeze", container)
    world = world.recovered()
    becomes(lambda: not world.container(container).status.frozen)
    assert container not in world.outside.guests.frozen
    world.close()


def test_a_stop_thaws_a_frozen_guest_so_that_it_shuts_down(world: World) -> None:
    _, container = world.running()
    do(world, "freeze", container)
    world.outside.vms.shuts_down_after = 3.0
    world.stop(container, 30)
    assert container not in world.outside.guests.frozen
    assert world.container(container).exit is not None


def test_a_pause_during_a_freeze_ends_neither(world: World) -> None:
    world.outside.clock.held = True
    _, container = world.running()
    do(world, "freeze", container)
    do(world, "pause", container)
    with pytest.raises(WrongState, match="virtshim resume"):
        do(world, "thaw", container)
    do(world, "resume", container)
    becomes(lambda: world.outside.guests.clocks_set == [container])
    assert container in world.outside.guests.frozen, "as long as it was to be"
    do(world, "thaw", container)


def test_a_freeze_that_the_guest_cannot_do_leaves_it_unfrozen(world: World) -> None:
    world.outside.clock.held = True
    _, container = world.running()
    world.journal.fail("guest_operations.freeze", WrongState("no guest agent answers"))
    with pytest.raises(WrongState, match="agent"):
        do(world, "freeze", container)
    assert not world.container(container).status.frozen
    assert do(world, "freeze", container), "and it may be tried again"


def test_a_guest_without_a_file_system_to_freeze_is_not_held(world: World) -> None:
    _, container = world.running()
    world.outside.guests.file_systems = 0
    with pytest.raises(WrongState, match="no file system that can be frozen"):
        do(world, "freeze", container)
    becomes(lambda: not world.container(container).status.frozen)
    world.outside.guests.file_systems = 1
    done = actions(world).freeze(world.container(container))
    assert done.message == "1 file system is frozen, for 60 s at most"


def test_a_guest_that_did_not_answer_a_freeze_is_thawed(world: World) -> None:
    _, container = world.running()
    world.journal.fail("guest_operations.freeze", Unavailable("the agent broke off"))
    with pytest.raises(Unavailable):
        do(world, "freeze", container)
    becomes(lambda: not world.container(container).status.frozen)


def test_a_thaw_is_retried_until_the_agent_answers(world: World) -> None:
    world.outside.clock.held = True
    _, container = world.running()
    do(world, "freeze", container)
    world.journal.fail("guest_operations.thaw", Unavailable("the agent broke off"))
    with pytest.raises(Unavailable):
        do(world, "thaw", container)
    becomes(lambda: not world.container(container).status.frozen)


def test_a_freeze_lasts_at_most_ten_minutes_and_needs_a_running_command(world: World) -> None:
    _, container = world.running()
    with pytest.raises(InvalidRequest, match="600"):
        do(world, "freeze", container, 601)
    waiting = world.create(world.run("other"), config=container_config(command=("job",)))
    world.outside.clock.held = True  # the time for the guest's agent must not run out meanwhile
    world.outside.guests.begin_error = Unavailable("the guest boots")
    world.start(waiting)
    with pytest.raises(WrongState, match="not begun"):
        do(world, "freeze", waiting)


def test_a_checkpoint_and_an_action_exclude_each_other(world: World) -> None:
    world.outside.clock.held = True
    _, container = world.running()
    running = world.container(container)
    world.records.containers.replace(running.with_checkpoint("/backup/vm.tar"))
    for action in ACTIONS:
        with pytest.raises(Aborted, match="checkpoint"):
            do(world, action, container)
    world.records.containers.replace(running)
    do(world, "pause", container)
    with pytest.raises(WrongState, match="virtshim resume"):
        world.do.checkpoint_container.checkpoint(world.container(container), "/backup/vm.tar", world.deadline())
    do(world, "resume", container)
    do(world, "freeze", container)
    with pytest.raises(WrongState, match="virtshim thaw"):
        world.do.checkpoint_container.checkpoint(world.container(container), "/backup/vm.tar", world.deadline())
    do(world, "thaw", container)


@pytest.mark.parametrize("action", ACTIONS)
def test_actions_need_a_running_vm(world: World, action: str) -> None:
    world.pull()
    container = world.create(world.run())
    with pytest.raises(WrongState, match="created"):
        do(world, action, container)
    world.start(container)
    world.stop(container)
    with pytest.raises(WrongState, match="exited"):
        do(world, action, container)


@pytest.mark.parametrize("action", ["reset", "reboot", "freeze", "thaw"])
def test_actions_that_need_a_running_guest_are_refused_for_a_paused_vm(world: World, action: str) -> None:
    _, container = world.running()
    do(world, "pause", container)
    with pytest.raises(WrongState, match="virtshim resume"):
        do(world, action, container)


def test_a_follower_of_the_action_log_gets_past_and_new_actions(world: World) -> None:
    _, container = world.running()
    log = actions(world).log
    do(world, "pause", container)
    heard: list[Action] = []
    left = threading.Event()

    def follow() -> None:
        for taken in log.follow(1, left):
            heard.append(taken.action)  # noqa: PERF401  each as it comes

    follower = threading.Thread(target=follow)
    follower.start()
    wait_until(lambda: heard == [Action.PAUSE], 20, "what was done is told")
    do(world, "resume", container)
    wait_until(lambda: heard == [Action.PAUSE, Action.RESUME], 20, "what is done is told")
    left.set()
    log.wake()
    follower.join(20)
    assert not follower.is_alive()
