"""The container's own command starts once, is logged, and its exit code is the container's."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fakes.world import LOG_DIRECTORY, World, container_config, sandbox_config
from podclient import wait_until

from virtshim.config.settings import Vm
from virtshim.guest.command import EntrypointProgress, OutputPosition, StreamPosition
from virtshim.model.container import Container, ContainerPhase, Exit, ExitReason, Mount, ProcessUser
from virtshim.model.errors import DeadlineExceeded, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason
from virtshim.streaming.ports import Output, OutStream
from virtshim.system.rate_limits import LOG_BURST, LOG_RATE

LOG = f"{LOG_DIRECTORY}/vm/0.log"


def said(piece: int, text: str = "", **end: Any) -> EntrypointProgress:
    """What brings a reader to that piece."""
    over = bool(end)
    output = (Output(OutStream.STDOUT, text.encode()),) if text else ()
    return EntrypointProgress(output, OutputPosition(StreamPosition(piece, 0, over), StreamPosition(0, 0, over)), **end)


def with_command(world: World, annotation: str = "", **changes: Any) -> ContainerId:
    annotations = {"virtshim.io/command": annotation} if annotation else {}
    sandbox = world.run(config=sandbox_config(annotations=annotations))
    config = container_config(**{"command": ("/bin/job",), "args": ("-x",), "envs": (("A", b"1"),)} | changes)
    return world.create(sandbox, config=config)


def ended(world: World, container: ContainerId) -> Exit:
    wait_until(lambda: world.container(container).phase is ContainerPhase.EXITED, 10, "the end")
    how = world.container(container).exit
    assert how is not None
    return how


def until(world: World, container: ContainerId, condition: Callable[[Container], bool]) -> None:
    wait_until(lambda: condition(world.container(container)), 10, "the record says so")


@pytest.mark.parametrize(("code", "reason"), [(0, ExitReason.COMPLETED), (3, ExitReason.ERROR)])
def test_the_commands_end_ends_the_vm_and_its_code_is_the_containers(
    world: World, code: int, reason: ExitReason
) -> None:
    world.outside.guests.tell(0, said(1, "hello\n"))
    world.outside.guests.tell(1, said(1, "bye\n", code=code))
    container = with_command(world)
    world.start(container)
    how = ended(world, container)
    assert (how.code, how.reason, how.message) == (code, reason, "")
    assert world.outside.vms.running() == []
    assert len(world.outside.vms.pressed) == 1, "asked by its power button, not killed"
    assert world.outside.entrypoint_logs.logs[LOG] == ["stdout hello\n", "stdout bye\n"]
    assert world.outside.entrypoint_logs.finished == [LOG]
    assert world.outside.consoles.logs == {}, "the console is no part of the log"


def test_the_command_gets_its_args_and_the_containers_environment(world: World) -> None:
    container = with_command(world)
    world.start(container)
    until(world, container, lambda found: found.status.command_begun)
    (command,) = world.outside.guests.begun[container]
    assert command.argv == ("/bin/job", "-x")
    assert dict(command.envs)["A"] == b"1"
    assert world.outside.consoles.following == {container: ""}, "the console is followed, into no log"


def test_the_commands_user_is_asked_for_until_it_is_known_and_then_kept(world: World) -> None:
    world.outside.guests.tell(0, said(1, "hello\n"))
    container = with_command(world)
    world.start(container)
    until(world, container, lambda found: found.status.command_begun)
    assert world.container(container).status.user is None
    world.outside.guests.process_user = ProcessUser(7, 8, (8, 9))
    until(world, container, lambda found: found.status.user == ProcessUser(7, 8, (8, 9)))
    world.outside.guests.process_user = ProcessUser(0, 0, (0,))
    world.outside.guests.tell(1, said(1, code=0))
    ended(world, container)
    assert world.container(container).status.user == ProcessUser(7, 8, (8, 9))


def test_the_user_of_a_command_that_ended_at_once_is_known(world: World) -> None:
    world.outside.guests.process_user = ProcessUser(7, 8, (8,))
    world.outside.guests.tell(0, said(0, code=0))
    container = with_command(world)
    world.start(container)
    ended(world, container)
    assert world.container(container).status.user == ProcessUser(7, 8, (8,))


def test_a_container_without_command_is_left_alone(world: World) -> None:
    _, container = world.running()
    assert world.container(container).spec.command == ()
    assert world.outside.guests.begun == {}


def test_an_annotation_turns_the_command_off(world: World) -> None:
    assert world.container(with_command(world, "ignore")).spec.command == ()


def test_a_pod_can_run_its_command_on_a_node_that_ignores_commands(tmp_path) -> None:
    world = World(tmp_path, vm=Vm(command="ignore"))
    world.pull()
    without = with_command(world)
    assert world.container(without).spec.command == ()
    world.remove_sandbox(world.container(without).sandbox_id)
    assert world.container(with_command(world, "run")).spec.command == ("/bin/job", "-x")
    world.close()


def test_a_guest_that_does_not_shut_down_is_destroyed_and_the_exit_code_stays(world: World) -> None:
    world.outside.vms.shuts_down_after = None
    world.outside.guests.tell(0, said(0, code=7))
    container = with_command(world)
    world.start(container)
    assert ended(world, container).code == 7


def test_a_guest_without_agent_ends_as_a_failed_start(world: World) -> None:
    world.outside.guests.begin_error = DeadlineExceeded("timed out waiting for the guest agent: install it")
    container = with_command(world)
    world.start(container)
    how = ended(world, container)
    assert (how.code, how.reason) == (128, ExitReason.START_ERROR)
    assert "install it" in how.message
    assert "vm.agent_timeout" in how.message
    assert world.outside.clock.now_ns() - world.container(container).status.started_at > 289e9


def test_a_wall_clock_set_forward_does_not_shorten_the_agents_time(world: World) -> None:
    """As time synchronization does soon after a node has booted."""
    world.outside.guests.begin_error = DeadlineExceeded("timed out waiting for the guest agent: install it")
    clock = world.outside.clock
    clock.at(1, lambda: clock.set_back(-7200))
    container = with_command(world)
    began = clock.monotonic()
    world.start(container)
    assert ended(world, container).code == 128
    assert clock.monotonic() - began >= 290


def test_an_agent_that_may_not_run_commands_is_not_waited_for(world: World) -> None:
    world.outside.guests.begin_error = WrongState("the guest agent does not allow guest-exec")
    container = with_command(world)
    world.start(container)
    assert ended(world, container).reason is ExitReason.START_ERROR
    assert world.outside.clock.now_ns() - world.container(container).status.started_at < 60e9


def test_the_error_of_a_command_that_cannot_start_says_why(world: World) -> None:
    world.outside.guests.tell(0, said(0, failure="the working directory /x is not in the guest"))
    container = with_command(world)
    world.start(container)
    how = ended(world, container)
    assert (how.code, how.reason) == (128, ExitReason.START_ERROR)
    assert "/x is not in the guest" in how.message


def test_a_lost_command_ends_the_container(world: World) -> None:
    world.outside.guests.still_there = False
    container = with_command(world)
    world.start(container)
    how = ended(world, container)
    assert (how.code, how.reason) == (255, ExitReason.ERROR)
    assert "is gone" in how.message


def test_a_command_is_not_lost_because_its_guest_took_long_to_boot(world: World) -> None:
    guests = world.outside.guests
    guests.begin_error = DeadlineExceeded("timed out waiting for the guest agent")
    guests.still_there = False  # the agent does not wait until what it started shows

    def boots() -> None:
        guests.begin_error = None

    def shows() -> None:
        guests.still_there = True
        guests.tell(0, said(0, "here\n", code=0))

    world.outside.clock.at(60.0, boots)
    world.outside.clock.at(65.0, shows)
    container = with_command(world)
    world.start(container)
    assert ended(world, container).code == 0


def test_a_daemon_that_keeps_the_streams_open_does_not_delay_the_end(world: World) -> None:
    world.outside.guests.tell(0, EntrypointProgress((), OutputPosition(), code=2))
    container = with_command(world)
    world.start(container)
    assert ended(world, container).code == 2


def test_a_stop_or_a_guest_shutdown_ends_the_container_as_without_a_command(world: World) -> None:
    container = with_command(world)
    world.start(container)
    until(world, container, lambda found: found.status.command_begun)
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.outside.vms.deliver()
    how = ended(world, container)
    assert (how.code, how.reason) == (0, ExitReason.COMPLETED)


def test_the_next_daemon_follows_the_command_and_does_not_start_it_again(world: World) -> None:
    world.outside.guests.tell(0, said(1, "before\n"))
    container = with_command(world)
    world.start(container)
    until(world, container, lambda found: found.status.command_begun)
    wait_until(lambda: world.outside.entrypoint_logs.read_to(container).out.piece == 1, 10, "it is read")
    after = world.recovered()
    after.outside.guests.tell(1, said(1, "after\n", code=9))
    assert ended(after, container).code == 9
    assert len(after.outside.guests.begun[container]) == 1
    assert after.outside.entrypoint_logs.logs[LOG][:2] == ["stdout before\n", "stdout after\n"]
    after.close()


@pytest.mark.parametrize("rebooted", [False, True])
def test_a_recorded_ending_survives_a_restart(world: World, rebooted: bool) -> None:
    container = with_command(world)
    world.start(container)
    until(world, container, lambda found: found.status.command_begun)
    world.app.entrypoints.close()
    how = Exit(6, ExitReason.ERROR, 1)
    world.records.containers.replace(world.container(container).with_ending(how))
    after = world.recovered(rebooted=rebooted)
    assert ended(after, container).code == 6
    after.close()


def test_a_command_is_polled_soon_after_its_start_and_less_often_while_it_is_silent_until_it_writes_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread waits on the fake clock, which costs no time: the waits are what counts."""
    waits: list[float] = []
    wait = world.outside.clock.wait

    def noted(event: threading.Event, seconds: float) -> bool:
        if threading.current_thread().name.startswith("command-"):
            waits.append(seconds)
        return wait(event, seconds)

    monkeypatch.setattr(world.outside.clock, "wait", noted)
    container = with_command(world)
    world.start(container)
    wait_until(lambda: len(waits) > 12, 10, "it is silent for a while")
    silent = waits[1:13]  # the first is that of the begin
    assert silent[0] < 0.05
    assert all(later == min(earlier * 1.5, 1.0) for earlier, later in itertools.pairwise(silent))
    assert silent[-1] == 1.0
    world.outside.guests.tell(0, said(1, "hello\n"))
    wait_until(lambda: 0.0 in waits[1:], 10, "it is looked at again at once")
    after = waits.index(0.0, 1)
    wait_until(lambda: len(waits) > after + 2, 10, "it is silent again")
    assert silent[0] < waits[after + 1] < 0.2


def test_a_command_that_writes_more_than_its_log_may_grow_is_made_to_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.outside.entrypoint_logs, "write", too_much(world))
    world.outside.guests.tell(0, said(1, "flood\n"))
    world.outside.guests.tell(1, said(2, "more\n", code=0))
    container = with_command(world)
    began = world.outside.clock.monotonic()
    world.start(container)
    ended(world, container)
    assert world.outside.clock.monotonic() - began >= 10, "10 s' worth of log beyond what it may write at once"


def too_much(world: World) -> Callable[..., int]:
    write = world.outside.entrypoint_logs.write

    def written(*args: Any) -> int:
        write(*args)
        return LOG_BURST + 10 * LOG_RATE

    return written


def test_a_log_is_reopened_where_the_command_writes(world: World) -> None:
    container = with_command(world)
    world.start(container)
    del world.outside.entrypoint_logs.logs[LOG]
    world.do.reopen_container_log.reopen(world.container(container))
    assert LOG in world.outside.entrypoint_logs.logs


TERMINATION = {
    "mounts": (Mount("/dev/termination-log", "/pods/uid/containers/vm/7f"),),
    "annotations": {"io.kubernetes.container.terminationMessagePath": "/dev/termination-log"},
}


def test_the_termination_message_is_in_kubelets_file_before_the_end_is_recorded(world: World) -> None:
    world.outside.guests.files["/dev/termination-log"] = b"x" * 5000 + b"the end"
    world.outside.guests.tell(0, said(1, "", code=3))
    container = with_command(world, **TERMINATION)
    world.start(container)
    assert ended(world, container).code == 3
    assert world.outside.guests.begun[container][0].termination_path == "/dev/termination-log"
    message = world.outside.termination_files.written["/pods/uid/containers/vm/7f"]
    assert len(message) == 4096
    assert message.endswith(b"the end")


def test_a_guest_that_does_not_give_the_termination_message_delays_no_end(world: World) -> None:
    world.journal.fail("guest_operations.read_tail", DeadlineExceeded("the connection to the guest agent broke"))
    world.outside.guests.tell(0, said(1, "", code=0))
    container = with_command(world, **TERMINATION)
    world.start(container)
    assert ended(world, container).code == 0
    assert world.outside.termination_files.written == {}


def test_attached_clients_get_the_logged_output_and_then_the_end(world: World) -> None:
    world.outside.guests.tell(0, said(1, "hello\n"))
    world.outside.guests.tell(1, said(1, "bye\n", code=3))
    container = with_command(world, stdin=True, tty=True)
    world.start(container)
    ended(world, container)
    assert [piece.data for piece in world.outside.entrypoint_listeners.said] == [b"hello\n", b"bye\n"]
    assert world.outside.entrypoint_listeners.codes == {container: 3}
    wait_until(lambda: world.outside.entrypoint_listeners.forgotten == [container], 10, "nobody remembers it")
    begun = world.outside.guests.begun[container][0]
    assert (begun.stdin, begun.tty, dict(begun.envs)["TERM"]) == (True, True, b"xterm")


@pytest.mark.hostile
def test_a_command_that_writes_a_byte_at_a_time_is_not_polled_without_a_pause(world: World) -> None:
    """Each look is half a dozen questions to its guest."""
    for piece in range(300):
        world.outside.guests.tell(piece, said(piece + 1, "."))
    world.outside.guests.tell(300, said(301, ".", code=0))
    container = with_command(world)
    began = world.outside.clock.monotonic()
    world.start(container)
    ended(world, container)
    assert world.outside.clock.monotonic() - began >= 10, "20 looks a second, once 100 are used up"


def test_the_end_is_recorded_even_after_an_unexpected_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    progress, failed = type(world.outside.guests).progress, []

    def fails_once(*arguments: Any) -> EntrypointProgress:
        if not failed:
            failed.append(True)
            raise OSError(24, "Too many open files")
        return progress(*arguments)

    monkeypatch.setattr(type(world.outside.guests), "progress", fails_once)
    world.outside.guests.tell(0, said(1, code=3))
    container = with_command(world)
    world.start(container)
    assert ended(world, container).code == 3
