"""ExecSync returns output and exit code over the real socket. A fake that the test scripts plays the guest."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from fakes.cri import Client, refused, served
from fakes.world import World
from podclient import wait_until

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.guest.command import CommandResult
from virtshim.model.errors import Aborted, DeadlineExceeded, WrongState

pytestmark = pytest.mark.cri

Code = grpc.StatusCode


def run(client: Client, container: str, *words: str, timeout: int = 0) -> pb.ExecSyncResponse:
    return client.ExecSync(pb.ExecSyncRequest(container_id=container, cmd=words, timeout=timeout))


def test_the_answer_has_output_and_exit_code(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.guests.do = lambda *_: CommandResult(3, b"out\xff", b"err")
    answer = run(client, made, "ls", "-l")
    assert (answer.stdout, answer.stderr, answer.exit_code) == (b"out\xff", b"err", 3)
    assert world.outside.guests.commands[0].argv == ("ls", "-l")


def test_the_command_has_the_settings_of_the_container_config(client: Client, world: World) -> None:
    sandbox = client.run()
    context = pb.LinuxContainerSecurityContext(
        run_as_user=pb.Int64Value(value=1000), run_as_group=pb.Int64Value(value=0), supplemental_groups=[5, 6]
    )
    made = client.create(
        sandbox,
        envs=[pb.KeyValue(key="A", value=b"1"), pb.KeyValue(key="PATH", value=b"/opt")],
        working_dir="/srv",
        linux=pb.LinuxContainerConfig(security_context=context),
    )
    client.start(made)
    run(client, made, "true")
    command = world.outside.guests.commands[0]
    assert dict(command.envs) == {"A": b"1", "PATH": b"/opt"}
    assert command.working_dir == "/srv"
    assert (command.user.user, command.user.group, command.user.supplementary) == ("1000", 0, (5, 6))


def test_a_group_without_a_user_is_refused(client: Client) -> None:
    sandbox = client.run()
    context = pb.LinuxContainerSecurityContext(run_as_group=pb.Int64Value(value=5))
    with refused(Code.INVALID_ARGUMENT, "run_as_group is set without"):
        client.create(sandbox, linux=pb.LinuxContainerConfig(security_context=context))


def test_a_container_that_does_not_run_is_refused(client: Client) -> None:
    sandbox = client.run()
    made = client.create(sandbox)
    with refused(Code.FAILED_PRECONDITION, "created"):
        run(client, made, "true")
    client.start(made)
    client.stop(made)
    with refused(Code.FAILED_PRECONDITION, "exited"):
        run(client, made, "true")


@pytest.mark.parametrize("words", [(), ("",), ("a\0b",)])
def test_an_empty_command_is_refused(client: Client, words: tuple[str, ...]) -> None:
    _, made = client.running()
    with refused(Code.INVALID_ARGUMENT, "command"):
        run(client, made, *words)


def test_a_negative_time_limit_is_refused(client: Client) -> None:
    _, made = client.running()
    with refused(Code.INVALID_ARGUMENT, "negative"):
        run(client, made, "true", timeout=-1)


def test_a_command_that_exceeds_its_time_limit_returns_deadline_exceeded(client: Client, world: World) -> None:
    def too_slow(_command: object, timeout: float, _cancelled: threading.Event) -> CommandResult:
        raise DeadlineExceeded(f"the command did not end within {timeout:g} s; it was killed")

    _, made = client.running()
    world.outside.guests.do = too_slow
    with refused(Code.DEADLINE_EXCEEDED, "within 2 s"):
        run(client, made, "true", timeout=2)


def test_the_error_about_a_guest_without_an_agent_has_the_remedy(client: Client, world: World) -> None:
    def no_agent(*_: object) -> CommandResult:
        raise WrongState("timed out waiting for the guest agent: install the package qemu-guest-agent")

    _, made = client.running()
    world.outside.guests.do = no_agent
    with refused(Code.FAILED_PRECONDITION, "qemu-guest-agent"):
        run(client, made, "true")


def _until_cancelled(started: threading.Semaphore, ended: threading.Semaphore):
    def do(_command: object, _timeout: float, cancelled: threading.Event) -> CommandResult:
        started.release()
        assert cancelled.wait(20)
        ended.release()
        raise Aborted("the caller gave up")

    return do


def test_a_client_that_goes_cancels_the_command(client: Client, world: World) -> None:
    _, made = client.running()
    started, ended = threading.Semaphore(0), threading.Semaphore(0)
    world.outside.guests.do = _until_cancelled(started, ended)
    call = client.runtime.ExecSync.future(pb.ExecSyncRequest(container_id=made, cmd=["sleep", "9"]))
    assert started.acquire(timeout=20)
    call.cancel()
    assert ended.acquire(timeout=20)


def test_commands_that_hang_leave_threads_for_the_rest(tmp_path) -> None:
    with served(tmp_path, cri={"max_calls": 8}) as (world, client, _):
        world.pull()
        _, made = client.running()
        started, ended = threading.Semaphore(0), threading.Semaphore(0)
        world.outside.guests.do = _until_cancelled(started, ended)
        request = pb.ExecSyncRequest(container_id=made, cmd=["sleep", "9"])
        calls = [client.runtime.ExecSync.future(request) for _ in range(3)]
        for _ in calls:
            assert started.acquire(timeout=20)
        with refused(Code.RESOURCE_EXHAUSTED, r"cri\.max_calls"):
            run(client, made, "true")
        assert client.Status(pb.StatusRequest()).status.conditions
        assert len(client.containers()) == 1
        for call in calls:
            call.cancel()
        for _ in calls:
            assert ended.acquire(timeout=20)
        world.outside.guests.do = lambda *_: CommandResult(0, b"", b"")
        wait_until(lambda: _runs(client, made), 20, "places are free again")


def _runs(client: Client, made: str) -> bool:
    try:
        return run(client, made, "true").exit_code == 0
    except grpc.RpcError:
        return False


def test_an_answer_is_never_larger_than_a_client_takes(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.guests.do = lambda *_: CommandResult(0, b"o" * (16 << 20), b"e" * (16 << 20))
    answer = run(client, made, "yes")
    assert 16_000_000 < len(answer.stdout) + len(answer.stderr) <= 16 << 20
    assert len(answer.stdout) == len(answer.stderr)
    world.outside.guests.do = lambda *_: CommandResult(0, b"o" * (16 << 20), b"the end")
    answer = run(client, made, "yes")
    assert answer.stderr == b"the end"
    assert len(answer.stdout) > 16_000_000


def test_removing_a_container_closes_its_agents_connection(client: Client, world: World) -> None:
    _, made = client.running()
    client.remove(made)
    assert [container.value for container in world.outside.guests.forgotten] == [made]


def test_commands_in_one_vm_run_side_by_side(client: Client, world: World) -> None:
    _, made = client.running()
    both = threading.Barrier(2)

    def meet(*_: object) -> CommandResult:
        both.wait(20)
        return CommandResult(0, b"", b"")

    world.outside.guests.do = meet
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: run(client, made, "true"), range(2)))
    assert [answer.exit_code for answer in answers] == [0, 0]


def test_verbose_status_marks_facts_that_come_from_the_guest(client: Client, world: World) -> None:
    _, made = client.running()
    request = pb.ContainerStatusRequest(container_id=made, verbose=True)
    assert "guestInfo" not in client.ContainerStatus(request).info
    world.outside.guests.told = {"hostname": "liar"}
    assert json.loads(client.ContainerStatus(request).info["guestInfo"]) == {"hostname": "liar"}
    assert "liar" not in client.ContainerStatus(request).info["info"]
    client.stop(made)
    assert "guestInfo" not in client.ContainerStatus(request).info


DRAIN = ("/bin/sh", "-c", "drain")


def with_hooks(client: Client) -> str:
    """A container as kubelet creates it: an annotation has the preStop handler as JSON."""
    handler = json.dumps({"exec": {"command": DRAIN}})
    made = client.create(client.run(), annotations={"io.kubernetes.container.preStopHandler": handler})
    client.start(made)
    return made


def test_a_post_start_hook_waits_as_long_as_a_guest_may_take_to_boot(client: Client, world: World) -> None:
    """kubelet sends hooks without a time limit, and a hook that fails kills the container."""
    made = with_hooks(client)
    run(client, made, "configure")
    world.outside.clock.advance(100)
    run(client, made, "configure")
    assert world.outside.guests.waits == [pytest.approx(300, abs=1), pytest.approx(200, abs=1)]


def test_pre_stop_hooks_and_commands_after_the_boot_do_not_wait_for_an_agent(client: Client, world: World) -> None:
    made = with_hooks(client)
    run(client, made, *DRAIN)
    world.outside.clock.advance(301)
    run(client, made, "true")
    assert world.outside.guests.waits == [0, 0]


@pytest.mark.parametrize(
    "handler", ["", "nonsense", "[]", "{}", '{"exec": null}', '{"exec": {"command": [1]}}', "[" * 9999]
)
def test_an_invalid_pre_stop_handler_is_ignored(client: Client, world: World, handler: str) -> None:
    made = client.create(client.run(), annotations={"io.kubernetes.container.preStopHandler": handler})
    client.start(made)
    run(client, made, "true")
    assert world.outside.guests.waits == [pytest.approx(300, abs=1)]
