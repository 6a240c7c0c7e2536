"""A container's own command runs as requested. The scripts are real; this machine's shell runs them in place of a
guest's."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from podclient import wait_until

from virtshim.guest.agents import AgentClients
from virtshim.guest.command import EntrypointProgress, GuestCommand, OutputPosition
from virtshim.model.container import ProcessUser, RunAs
from virtshim.model.errors import DeadlineExceeded, ShimError, WrongState
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import OutStream

CONTAINER = ContainerId("c" * 64)
PATH = (("PATH", b"/usr/sbin:/usr/bin:/sbin:/bin"),)
OUT, ERR = OutStream.STDOUT, OutStream.STDERR


def shell(script: str, **changes: object) -> GuestCommand:
    return GuestCommand(("sh", "-c", script), **{"envs": PATH} | changes)


class Reader:
    def __init__(self, clients: AgentClients) -> None:
        self.clients = clients
        self.read_to = OutputPosition()
        self.seen = {OUT: b"", ERR: b""}
        self.last = EntrypointProgress((), OutputPosition())

    def look(self) -> bool:
        """True when the command has ended and all is read."""
        self.last = self.clients.progress(CONTAINER, self.read_to)
        self.read_to = self.last.read_to
        for piece in self.last.output:
            self.seen[piece.stream] += piece.data
        return self.last.ended and self.read_to.over

    def until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: self.look() or condition(), 20, what)

    def to_the_end(self) -> EntrypointProgress:
        wait_until(self.look, 20, "the command's end")
        return self.last


@pytest.fixture
def reader(clients) -> Reader:
    return Reader(clients)


def start_entrypoint(clients: AgentClients, command: GuestCommand) -> None:
    clients.start_entrypoint(CONTAINER, command, 10.0, threading.Event())


def test_streams_are_separate_and_the_exit_code_is_exact(guest, clients, reader):
    start_entrypoint(
        clients, shell("echo out $A; echo err >&2; pwd; exit 3", envs=(*PATH, ("A", b"b c")), working_dir="/usr")
    )
    assert reader.to_the_end().code == 3
    assert reader.seen == {OUT: b"out b c\n/usr\n", ERR: b"err\n"}


def test_the_highest_exit_code_of_a_process_is_reported(guest, clients, reader):
    start_entrypoint(clients, shell("exit 255"))
    assert reader.to_the_end().code == 255


def test_output_is_read_while_the_command_runs_and_other_readers_continue_where_one_stopped(
    guest, clients, reader, layout
):
    go = guest.run / "go"
    start_entrypoint(clients, shell(f"echo one; until [ -e {go} ]; do sleep 0.01; done; echo two; exit 4"))
    reader.until(lambda: reader.seen[OUT] == b"one\n", "the first line")
    assert not reader.last.ended
    guest.restart_agent()
    second = AgentClients(layout, guest.plug)  # as after a restart of virtshim
    clients.close()
    reader.clients = second
    start_entrypoint(second, shell("echo it must not run twice"))
    go.touch()
    assert reader.to_the_end().code == 4
    assert reader.seen[OUT] == b"one\ntwo\n"
    second.close()


def test_a_command_is_known_while_it_runs_and_after_it_has_ended(make_guest, clients, reader):
    guest = make_guest()
    start_entrypoint(clients, shell(f"until [ -e {guest.run}/go ]; do sleep 0.01; done; exit 5"))
    wait_until(lambda: clients.entrypoint_exists(CONTAINER), 20, "it has begun")
    (guest.run / "go").touch()
    assert reader.to_the_end().code == 5
    assert clients.entrypoint_exists(CONTAINER)


def test_unread_output_waits_and_none_is_lost(make_guest, clients, reader):
    guest = make_guest()
    start_entrypoint(
        clients, shell("head -c 6000000 /dev/urandom >data; cat data; touch done", working_dir=str(guest.run))
    )
    base = guest.run / f"virtshim-command-{CONTAINER.short}"
    wait_until((base / "stdout.7").exists, 20, "eight pieces")
    assert sum(path.stat().st_size for path in base.glob("stdout.*")) <= 8 * 64 * 4096
    assert not (base / "stdout.8").exists()
    assert not (guest.run / "done").exists(), "it waits for its reader"
    assert reader.to_the_end().code == 0
    assert reader.seen[OUT] == (guest.run / "data").read_bytes()


def test_a_command_that_cannot_start_is_reported_with_the_reason(make_guest, clients, reader):
    make_guest()
    start_entrypoint(clients, shell("true", working_dir="/no/such"))
    progress = reader.to_the_end()
    assert (progress.code, reader.seen[OUT]) == (None, b"")
    assert "the guest has no working directory /no/such" in progress.failure


def test_an_unknown_user_is_reported(make_guest, clients, reader):
    make_guest()
    start_entrypoint(clients, shell("true", user=RunAs("nobody-of-that-name")))
    assert "no user nobody-of-that-name" in reader.to_the_end().failure


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize("tty", [False, True])
def test_the_commands_first_user_is_known_even_after_it_changed_user_or_ended(guest, clients, reader, tty):
    assert clients.entrypoint_user(CONTAINER) is None
    becomes = ("setpriv", "--reuid=7", "--regid=8", "--clear-groups", "sh", "-c", "id -u; [ ! -e /proc/$$/fd/8 ]")
    start_entrypoint(clients, GuestCommand(becomes, PATH, user=RunAs("0", 4, (9, 3), own_groups=False), tty=tty))
    assert reader.to_the_end().code == 0
    assert reader.seen[OUT].split() == [b"7"]
    assert clients.entrypoint_user(CONTAINER) == ProcessUser(0, 4, (4, 3, 9))


def test_without_a_user_the_command_runs_as_the_agents_user(guest, clients, reader):
    start_entrypoint(clients, shell("true"))
    reader.to_the_end()
    groups = tuple(dict.fromkeys((os.getegid(), *sorted(os.getgroups()))))
    assert clients.entrypoint_user(CONTAINER) == ProcessUser(os.geteuid(), os.getegid(), groups)


@pytest.mark.parametrize(
    "said",
    [
        "",
        "Uid:\t1\t1\t1\t1;Gid:\t1\t1\t1\t1;Groups:\t1 2",  # not whole
        "Uid:\t1\t4294967296\t1\t1;Gid:\t1\t1\t1\t1;Groups:\t\n",
        "Uid:\t1\t1\t1\t1;Gid:\t1\t1\t1\t1;Groups:\tx\n",
        "Uid:\t1\t1\t1\t1;Gid:\t1\t1\t1\t1;Groups:" + "\t1" * 20000 + "\n",
    ],
)
def test_a_malformed_user_file_gives_no_user(make_guest, clients, said):
    base = make_guest().run / f"virtshim-command-{CONTAINER.short}"
    base.mkdir()
    (base / "user").write_text(said)
    assert clients.entrypoint_user(CONTAINER) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_the_command_runs_as_the_requested_user(guest, clients, reader):
    start_entrypoint(clients, shell("id -u; id -g", user=RunAs("65534", 1)))
    reader.to_the_end()
    assert reader.seen[OUT] == b"65534\n1\n"


def test_a_program_that_is_not_there_is_127(make_guest, clients, reader):
    make_guest()
    start_entrypoint(clients, GuestCommand(("no-such-program",), PATH))
    assert reader.to_the_end().code == 127


def test_a_lost_command_is_reported_as_absent(make_guest, clients):
    guest = make_guest()
    assert not clients.entrypoint_exists(CONTAINER)
    start_entrypoint(clients, shell("sleep 5"))
    pid = guest.run / f"virtshim-command-{CONTAINER.short}" / "pid"
    wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"), 20, "it runs")
    os.kill(int(pid.read_text()), 9)
    os.waitpid(int(pid.read_text()), 0)  # as the agent does
    assert not clients.entrypoint_exists(CONTAINER)


def test_an_agent_that_may_not_read_files_is_found_out_before_the_command_runs(make_guest, clients):
    guest = make_guest()
    guest.disabled.add("guest-file-open")
    with pytest.raises(WrongState, match="does not allow guest-file-open"):
        start_entrypoint(clients, shell("true"))
    assert guest.running() == 0


def test_without_an_agent_the_wait_is_bounded(make_guest, clients):
    guest = make_guest()
    guest.canned["guest-sync-delimited"] = -1
    with pytest.raises(DeadlineExceeded, match="install the package qemu-guest-agent"):
        clients.start_entrypoint(CONTAINER, shell("true"), 0.05, threading.Event())


@pytest.mark.parametrize("lie", [{"buf-b64": "!"}, {"buf-b64": "A" * 200_000}, 7, {}])
def test_a_false_answer_about_files_is_an_error(make_guest, clients, reader, lie):
    guest = make_guest()
    start_entrypoint(clients, shell("true"))
    reader.to_the_end()
    guest.canned["guest-file-read"] = lie
    reader.read_to = OutputPosition()
    try:
        assert reader.look() is False
        assert reader.seen[OUT] == b""
    except ShimError as exc:
        assert "usable" in str(exc) or "more of a file" in str(exc)


def test_the_commands_directory_is_for_root_only(make_guest, clients, reader):
    guest = make_guest()
    start_entrypoint(clients, shell("true"))
    reader.to_the_end()
    assert Path(guest.run, f"virtshim-command-{CONTAINER.short}").stat().st_mode & 0o777 == 0o700


def test_the_termination_message_file_is_empty_and_writable_for_all(guest, clients, reader, tmp_path: Path):
    report = tmp_path / "deeper" / "termination-log"
    start_entrypoint(clients, shell(f"ls -l {report}; echo it failed > {report}; exit 1", termination_path=str(report)))
    assert reader.to_the_end().code == 1
    assert reader.seen[OUT].startswith(b"-rw-rw-rw-")
    assert clients.operations.read_tail(CONTAINER, str(report), 4096, 10) == b"it failed\n"


def test_an_earlier_termination_message_is_cleared(guest, clients, reader, tmp_path: Path):
    old = tmp_path / "old"
    old.write_text("from the attempt before")
    start_entrypoint(clients, shell("exit 0", termination_path=str(old)))
    reader.to_the_end()
    assert old.read_text() == ""


def test_a_termination_path_that_is_no_regular_file_is_left_alone(guest, clients, reader, tmp_path: Path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    start_entrypoint(clients, shell("exit 0", termination_path=str(fifo)))
    assert reader.to_the_end().code == 0
    assert fifo.is_fifo()


@pytest.fixture
def on_the_root() -> Iterator[Path]:
    """A directory for everybody on the root file system, where pytest's own need not be."""
    top = next(top for top in ("/tmp", "/") if os.stat(top).st_dev == os.stat("/").st_dev)
    with tempfile.TemporaryDirectory(dir=top) as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="NOT TESTED: only root may have mounts of its own, in most containers not even root",
)
@pytest.mark.parametrize("user", ["", "65534"])
def test_the_root_file_system_is_read_only_for_the_command_only(guest, clients, reader, on_the_root: Path, user: str):
    report = on_the_root / "termination-log"
    script = f"touch {on_the_root}/file; echo words > {report}; echo > /dev/null && echo $(id -u)"
    command = shell(script, termination_path=str(report), readonly_root=True, user=RunAs(user))
    start_entrypoint(clients, command)
    assert reader.to_the_end().code == 0
    assert user or b"Read-only file system" in reader.seen[ERR]
    assert reader.seen[OUT] == (user or "0").encode() + b"\n"
    assert user or report.read_text() == "words\n"
    (on_the_root / "file").touch()


def signalled(clients: AgentClients, number: int) -> bool:
    return clients.signal_entrypoint(CONTAINER, number, 20.0, threading.Event())


def test_a_signal_reaches_the_command_itself_and_its_end_is_read(guest, clients, reader):
    start_entrypoint(clients, shell("trap 'echo told; exit 9' USR1; echo up; while :; do sleep 0.05; done"))
    reader.until(lambda: reader.seen[OUT] == b"up\n", "the command runs")
    assert signalled(clients, 0)
    assert not reader.last.ended
    assert signalled(clients, 10)
    assert reader.to_the_end().code == 9
    assert reader.seen[OUT] == b"up\ntold\n"
    assert not signalled(clients, 0)


def test_a_command_without_signal_handlers_ends_by_the_signal(guest, clients, reader):
    start_entrypoint(clients, shell("exec sleep 60"))
    wait_until(lambda: signalled(clients, 15), 60, "it runs")
    assert reader.to_the_end().code == 128 + 15


def test_a_command_with_a_terminal_gets_its_signal_too(guest, clients, reader):
    script = "trap 'echo told; exit 9' TERM; echo up; while :; do sleep 0.05; done"
    start_entrypoint(clients, shell(script, tty=True))
    reader.until(lambda: b"up" in reader.seen[OUT], "the command runs")
    assert signalled(clients, 15)
    assert reader.to_the_end().code == 9
    assert b"told" in reader.seen[OUT]


def test_signalling_a_missing_command_reports_that_it_is_missing(guest, clients):
    assert not signalled(clients, 15)
