"""The agent freezes file systems, sets the clock and adds SSH keys."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from fakes.background import Background
from fakes.waiting import eventually

from virtshim.guest.command import CommandResult, GuestCommand
from virtshim.model.errors import Aborted, DeadlineExceeded, InternalError, NotFound, Unavailable, WrongState
from virtshim.model.ids import ContainerId

CONTAINER = ContainerId("c" * 64)
KEY = "ssh-ed25519 AAAA me@here"


def test_file_systems_stay_frozen_until_the_thaw(clients, make_guest):
    guest = make_guest()
    assert clients.operations.freeze(CONTAINER, 10) == 2
    assert guest.frozen
    clients.operations.thaw(CONTAINER, 10)
    assert not guest.frozen
    clients.operations.thaw(CONTAINER, 10)


def test_a_guest_without_an_agent_is_neither_frozen_nor_waited_for(clients):
    """Otherwise its time would be over, and that be said."""
    with pytest.raises(Unavailable):
        clients.operations.freeze(CONTAINER, 10)


def test_an_agent_that_may_not_freeze_says_so(clients, make_guest):
    make_guest().disabled = {"guest-fsfreeze-freeze"}
    with pytest.raises(WrongState, match="guest-fsfreeze-freeze"):
        clients.operations.freeze(CONTAINER, 10)


def test_a_command_waits_for_frozen_file_systems(clients, make_guest):
    guest = make_guest()
    clients.operations.freeze(CONTAINER, 10)
    command, done = GuestCommand(("echo", "moves")), threading.Event()
    results: list[CommandResult] = []

    def run() -> None:
        results.append(clients.run(CONTAINER, command, 30, threading.Event()))
        done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert not done.wait(0.15)
    assert guest.running() == 0
    clients.operations.thaw(CONTAINER, 10)
    thread.join(30)
    assert [result.stdout for result in results] == [b"moves\n"]


def test_a_command_that_waits_for_a_long_freeze_ends_at_its_time_limit(clients, make_guest):
    make_guest()
    clients.operations.freeze(CONTAINER, 10)
    with pytest.raises(DeadlineExceeded):
        clients.run(CONTAINER, GuestCommand(("true",)), 0.2, threading.Event())
    clients.operations.thaw(CONTAINER, 10)


@pytest.mark.parametrize("told", [True, False])
def test_a_stopped_clock_is_set_in_the_way_that_the_agent_supports(clients, make_guest, told):
    guest = make_guest()
    guest.may_set_time = told
    guest.clock_ns -= 3_600 * 10**9
    clients.operations.set_clock(CONTAINER, 10)
    assert abs(guest.clock_ns - time.time_ns()) < 5 * 10**9


def test_a_clock_that_is_right_is_left_alone(clients, make_guest):
    guest = make_guest()
    guest.disabled = {"guest-set-time"}
    guest.clock_ns = time.time_ns()
    guest.canned = {"guest-get-time": time.time_ns() + 10**8}
    clients.operations.set_clock(CONTAINER, 10)


@pytest.mark.parametrize("lie", [-1, "noon", None, 1 << 70, {}])
def test_a_guest_that_reports_no_time_is_an_error(clients, make_guest, lie):
    make_guest().canned = {"guest-get-time": lie}
    with pytest.raises(InternalError):
        clients.operations.set_clock(CONTAINER, 10)


def test_ssh_keys_are_added_once(clients, make_guest):
    guest = make_guest()
    clients.operations.add_ssh_keys(CONTAINER, "root", [KEY], 10)
    clients.operations.add_ssh_keys(CONTAINER, "root", [KEY, "ssh-rsa BBBB"], 10)
    assert guest.ssh_keys["root"] == [KEY, "ssh-rsa BBBB"]
    with pytest.raises(NotFound, match="nobody"):
        clients.operations.add_ssh_keys(CONTAINER, "nobody", [KEY], 10)
    guest.disabled = {"guest-ssh-add-authorized-keys"}
    with pytest.raises(WrongState, match=r"5\.2"):
        clients.operations.add_ssh_keys(CONTAINER, "root", [KEY], 10)


@pytest.mark.parametrize(("size", "got"), [(0, 0), (7, 7), (4096, 4096), (5000, 4096)])
def test_the_end_of_a_file_is_read(clients, make_guest, tmp_path: Path, size: int, got: int):
    make_guest()
    content = bytes(at % 251 for at in range(size))
    (tmp_path / "said").write_bytes(content)
    assert clients.operations.read_tail(CONTAINER, str(tmp_path / "said"), 4096, 10) == content[size - got :]


def test_the_tail_of_a_missing_file_is_empty(clients, make_guest, tmp_path: Path):
    make_guest()
    assert clients.operations.read_tail(CONTAINER, str(tmp_path / "none"), 4096, 10) == b""


def test_a_script_is_given_up_when_its_caller_gives_up(clients, make_guest):
    guest, gives_up = make_guest(), threading.Event()
    ended = Background(
        lambda: clients.operations.run_script(CONTAINER, "read line; sleep 60", (), b"data", 60, gives_up)
    )
    eventually(lambda: guest.running() == 1)
    gives_up.set()
    with pytest.raises(Aborted):
        ended.done()


def test_a_failed_console_resize_is_reported(clients, make_guest):
    make_guest().shell = ["/bin/false"]
    with pytest.raises(InternalError, match="exit code 1"):
        clients.operations.resize_console(CONTAINER, 80, 24, 10)
