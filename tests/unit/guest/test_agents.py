"""Commands work from start to end. The scripts are real; this machine's shell runs them in place of a guest's."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from fakes.background import Background
from podclient import wait_until

from virtshim.guest.agents import OUTPUT_LIMIT, AgentClients
from virtshim.guest.command import CommandResult, GuestCommand
from virtshim.guest.wait import ExecLimits
from virtshim.model.container import RunAs
from virtshim.model.errors import (
    Aborted,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ResourceExhausted,
    ShimError,
    Unavailable,
    WrongState,
)
from virtshim.model.ids import ContainerId

CONTAINER = ContainerId("c" * 64)
PATH = (("PATH", b"/usr/sbin:/usr/bin:/sbin:/bin"),)
SHELLS = ["dash", "bash", "busybox sh"]


def shell(script: str, **changes: object) -> GuestCommand:
    return GuestCommand(("sh", "-c", script), **{"envs": PATH} | changes)


@pytest.fixture
def run(clients):
    def call(command: GuestCommand, timeout: float = 20.0, cancelled: threading.Event | None = None) -> CommandResult:
        return clients.run(CONTAINER, command, timeout, cancelled or threading.Event())

    return call


def alive(mark: str) -> bool:
    """Whether a process with that in its environment runs."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if f"MARK={mark}\0".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    return True
            except OSError:
                continue
    return False


def test_streams_are_separate_and_the_exit_code_is_exact(guest, run):
    assert run(shell("echo out; echo err >&2; exit 7")) == CommandResult(7, b"out\n", b"err\n")


def test_death_by_a_signal_is_reported_as_128_plus_the_signal(guest, run):
    assert run(shell("kill -9 $$")) == CommandResult(137, b"", b"")


def test_arguments_arrive_as_they_are(guest, run):
    words = ("a b", "", "*", "$HOME", "it's", '"', "-n", "\\n", "ü\n", "%s", "--")
    result = run(GuestCommand(("printf", "%s|", *words), PATH))
    assert result.stdout.decode() == "".join(f"{word}|" for word in words)


def test_output_may_have_any_bytes(guest, run, tmp_path):
    data = os.urandom(300_000)
    (tmp_path / "data").write_bytes(data)
    result = run(shell(f"cat {tmp_path}/data; cat {tmp_path}/data >&2"))
    assert (result.stdout, result.stderr) == (data, data)


def test_a_command_has_no_input(guest, run):
    assert run(GuestCommand(("cat",), PATH)) == CommandResult(0, b"", b"")


def test_a_command_that_is_not_there_is_127(guest, run):
    result = run(GuestCommand(("no-such-command",), PATH))
    assert result.code == 127
    assert b"no-such-command" in result.stderr


def test_the_environment_is_the_containers(make_guest, run):
    make_guest()
    envs = (*PATH, ("A", b"it is"), ("odd.name", "ü=\n".encode()), ("EMPTY", b""))
    lines = run(GuestCommand(("env", "-0"), envs)).stdout.decode().split("\0")
    assert {"A=it is", "odd.name=ü=\n", "EMPTY="} <= set(lines)
    assert not any(line.startswith("PYTEST") for line in lines)


def test_variables_with_the_names_of_the_scripts_variables_are_unchanged(guest, run):
    own = {"user": b"a", "dir": b"b", "token": b"c", "out": b"d", "size": b"e", "groups": b"f", "name": b"g"}
    said = run(GuestCommand(("env",), (*PATH, *own.items()))).stdout.splitlines()
    assert {b"%s=%s" % (name.encode(), value) for name, value in own.items()} <= set(said)


def test_a_value_that_cannot_be_passed_on_is_reported(make_guest, run):
    make_guest()
    with pytest.raises(InvalidRequest, match="LATIN"):
        run(shell("true", envs=(("LATIN", b"\xfc"),)))


def test_the_working_directory_is_the_containers(guest, run, tmp_path):
    assert run(shell("pwd", working_dir=str(tmp_path))).stdout.decode() == f"{tmp_path}\n"
    with pytest.raises(InvalidRequest, match="/no/such"):
        run(shell("pwd", working_dir="/no/such"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes users")
@pytest.mark.parametrize("guest_shell", ["dash", "bash"])
def test_the_user_and_groups_are_the_containers(make_guest, run, guest_shell):
    make_guest().shell = [guest_shell]
    result = run(shell("id -u; id -g; id -G; echo $HOME", user=RunAs("1234", 4321, (77, 88))))
    assert result.stdout.decode().split("\n")[:2] == ["1234", "4321"]
    assert set(result.stdout.decode().split("\n")[2].split()) == {"4321", "77", "88"}
    assert result.stdout.decode().split("\n")[3] == "/"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has groups given")
def test_groups_without_a_user_are_roots(make_guest, run):
    make_guest().shell = ["dash"]
    uid, groups = run(shell("id -u; id -G", user=RunAs(supplementary=(77, 88)))).stdout.decode().splitlines()
    assert uid == "0"
    assert {"77", "88"} < set(groups.split())


@pytest.mark.skipif(os.geteuid() != 0, reason="what root may do")
def test_root_runs_without_groups_if_no_tool_can_set_them(make_guest, run):
    make_guest().shell = ["busybox", "sh"]
    assert run(shell("id -u", user=RunAs(supplementary=(77,)))).stdout == b"0\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes users")
def test_a_named_user_has_the_group_and_home_of_the_guests_passwd(guest, run):
    assert run(shell("id -un; id -gn; echo $HOME", user=RunAs("daemon"))).stdout == b"daemon\ndaemon\n/usr/sbin\n"


def test_an_unknown_user_is_reported(guest, run):
    with pytest.raises(InvalidRequest, match="nobody-like-this"):
        run(shell("true", user=RunAs("nobody-like-this")))


def test_the_time_limit_kills_the_command_and_its_children(guest, run):
    mark = os.urandom(8).hex()
    script = "setsid sleep 300 & sleep 300 & (sleep 300; true) & sleep 300; true"
    with pytest.raises(DeadlineExceeded, match="1 s; it was killed"):
        run(shell(script, envs=(*PATH, ("MARK", mark.encode()))), timeout=1)
    wait_until(lambda: not alive(mark), 20, "its processes are gone")


def test_a_command_ends_when_its_caller_leaves(make_guest, run):
    make_guest()
    mark, cancelled = os.urandom(8).hex(), threading.Event()
    running = Background(lambda: run(shell("sleep 300", envs=(*PATH, ("MARK", mark.encode()))), 0, cancelled))
    wait_until(lambda: alive(mark), 20, "it runs")
    cancelled.set()
    with pytest.raises(Aborted):
        running.done()
    wait_until(lambda: not alive(mark), 20, "it is gone")


def test_a_daemon_left_behind_blocks_neither_the_caller_nor_the_ports(make_guest, run):
    guest = make_guest(ports=2)
    mark = os.urandom(8).hex()
    result = run(shell("sleep 300 & echo started", envs=(*PATH, ("MARK", mark.encode()))))
    assert result == CommandResult(0, b"started\n", b"")
    assert run(shell("echo next")).stdout == b"next\n"
    assert alive(mark), "it lives on"
    run(shell(f"for p in /proc/[0-9]*; do grep -qs MARK={mark} $p/environ && kill -9 ${{p#/proc/}}; done; true"))
    wait_until(lambda: guest.running() == 0, 20, "the agent keeps no record")


def test_output_beyond_the_limit_is_dropped_and_the_command_continues(make_guest, run):
    make_guest()
    result = run(shell(f"head -c {OUTPUT_LIMIT + 3_000_000} /dev/zero; echo done >&2; exit 3"))
    assert (result.code, len(result.stdout), result.stderr) == (3, OUTPUT_LIMIT, b"done\n")


def test_a_process_list_does_not_confuse_the_streams(make_guest, run):
    make_guest()
    result = run(GuestCommand(("ps", "axww"), PATH))
    assert result.code == 0
    assert b"virtshim-exec" in result.stdout


def test_parallel_commands_get_more_ports_than_the_vm_started_with(make_guest, run):
    guest = make_guest(ports=3)
    mark = os.urandom(8).hex()
    wait = f"touch {guest.run}/{mark}.$0; until [ -e {guest.run}/go ]; do sleep 0.05; done; echo $0; exit $0"
    calls = [Background(lambda n=n: run(GuestCommand(("sh", "-c", wait, str(n)), PATH))) for n in range(6)]
    wait_until(lambda: len(list(guest.run.glob(f"{mark}.*"))) == 6, 20, "all run at the same time")
    (guest.run / "go").touch()
    results = [call.done() for call in calls]
    assert [(result.code, result.stdout) for result in results] == [(n, f"{n}\n".encode()) for n in range(6)]
    assert guest.ports() == 12, "not one more than was wanted"


def test_ports_that_were_plugged_in_are_known_after_a_restart(make_guest, run, clients, layout):
    guest = make_guest(ports=2)
    go = guest.run / "go"
    first = Background(lambda: run(shell(f"touch {go}.1; until [ -e {go} ]; do sleep 0.05; done")))
    wait_until(lambda: go.with_suffix(".1").exists(), 20, "the first runs")
    run(shell(f"touch {go}"))
    first.done()
    wait_until(lambda: guest.running() == 0, 20, "the ports are free")
    clients.close()
    again = AgentClients(layout, lambda *_: pytest.fail("there are enough"))
    wait = shell(f"touch {guest.run}/met.$$; until [ $(ls {guest.run}/met.* | wc -l) = 2 ]; do sleep 0.05; done")
    results = [Background(lambda: again.run(CONTAINER, wait, 20, threading.Event())) for _ in range(2)]
    assert [one.done().code for one in results] == [0, 0]
    again.close()
    assert guest.ports() == 4


def test_a_port_that_the_guest_does_not_take_up_is_never_used(make_guest, run):
    guest = make_guest(ports=2)
    guest.ports_not_taken_up = {2, 5}
    go = guest.run / "go"
    wait = f"touch {guest.run}/met.$$; until [ -e {go} ]; do sleep 0.05; done"
    calls = [Background(lambda: run(shell(wait), 0)) for _ in range(3)]
    wait_until(lambda: len(list(guest.run.glob("met.*"))) == 3, 30, "all run")
    go.touch()
    assert [call.done().code for call in calls] == [0, 0, 0]


@pytest.mark.parametrize("limits", [ExecLimits(lease=0.2)])
def test_without_a_free_port_the_message_says_what_to_do(make_guest, run):
    guest = make_guest(ports=2, slots=2)
    cancelled = threading.Event()
    mark = os.urandom(8).hex()
    first = Background(lambda: run(shell("sleep 300", envs=(*PATH, ("MARK", mark.encode()))), 0, cancelled))
    wait_until(lambda: alive(mark), 20, "the first runs")
    with pytest.raises(
        ResourceExhausted, match=r"all 2 ports .* no more fit \(no free slot\); wait for a command to end"
    ):
        run(shell("true"))
    assert sorted(Path(guest.sockets).glob("exec-*.sock")) == [Path(guest.sockets, f"exec-{n}.sock") for n in (0, 1)]
    cancelled.set()
    with pytest.raises(Aborted):
        first.done()
    assert run(shell("echo free")).stdout == b"free\n"


def test_a_vm_without_ports_says_so(make_guest, run):
    make_guest(ports=0)
    with pytest.raises(WrongState, match=r"virtshim\.io/exec-ports"):
        run(shell("true"))


def test_a_forbidden_guest_exec_is_reported(make_guest, run):
    make_guest().disabled.add("guest-exec")
    with pytest.raises(WrongState, match="allow it in the guest"):
        run(shell("true"))


def test_commands_end_with_their_vm(make_guest, run):
    guest, mark = make_guest(), os.urandom(8).hex()
    running = Background(lambda: run(shell("sleep 300", envs=(*PATH, ("MARK", mark.encode()))), 0))
    wait_until(lambda: alive(mark), 20, "it runs")
    guest.close()
    with pytest.raises(Unavailable):
        running.done()


@pytest.mark.parametrize("limits", [ExecLimits(silence=0.2)])
def test_a_command_that_the_agent_no_longer_knows_is_lost(make_guest, run):
    """The guest, or its agent, was restarted."""
    guest, mark = make_guest(), os.urandom(8).hex()
    running = Background(lambda: run(shell("sleep 300", envs=(*PATH, ("MARK", mark.encode()))), 0))
    wait_until(lambda: alive(mark), 20, "it runs")
    guest.restart_agent()
    with pytest.raises(InternalError, match="lost"):
        running.done()
    wait_until(lambda: not alive(mark), 20, "nothing is left of it")


def test_commands_left_running_by_an_earlier_daemon_are_ended_once(make_guest, run):
    guest = make_guest()
    run(shell("true"))
    run(shell("true"))
    assert guest.swept == 1


@pytest.mark.parametrize("answer", [{}, {"pid": "x"}, {"pid": True}, {"pid": -5}, [], None])
def test_a_false_answer_about_the_process_is_an_error_and_frees_the_ports(make_guest, run, answer):
    guest = make_guest(ports=2)
    guest.canned["guest-exec"] = answer
    with pytest.raises(ShimError):
        run(shell("true"))
    guest.canned.clear()
    assert run(shell("echo fine")).stdout == b"fine\n"


def test_a_hook_does_not_wait_for_an_agent_that_has_its_port_closed(layout) -> None:
    clients = AgentClients(layout, lambda *_: None, lambda _container: False)
    with pytest.raises(WrongState, match=r"nothing in the guest listens .* qemu-guest-agent"):
        clients.run(CONTAINER, shell("true"), 0, threading.Event(), 0.0)
    clients.close()


def test_the_first_answer_of_each_connection_is_reported_with_its_container(layout, make_guest) -> None:
    guest, told = make_guest(), []
    clients = AgentClients(layout, lambda _container, number: guest.plug(number), answers=told.append)
    try:
        for _ in range(2):
            clients.guest_info(CONTAINER, 30)
        assert told == [CONTAINER]
    finally:
        clients.close()


def test_a_command_returns_its_ports_even_without_a_new_thread(make_guest, clients, run, monkeypatch):
    make_guest(ports=2, slots=2)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("exec-settle"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(3):
        assert run(shell("echo out")) == CommandResult(0, b"out\n", b"")
