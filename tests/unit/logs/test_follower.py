"""One follower writes the logs of all consoles, also without inotify and after a kill."""

import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from leaks import OpenedSince

from virtshim.logs.files import LogFile
from virtshim.logs.follower import ConsoleLogs
from virtshim.logs.tail import Pace
from virtshim.model.errors import InvalidRequest, Unavailable, WrongState

PROJECT = Path(__file__).parents[3]
Eventually = Callable[..., None]


@pytest.fixture
def logs(make_logs: Any) -> ConsoleLogs:
    found: ConsoleLogs = make_logs()
    return found


@pytest.fixture
def opened(machine: Any, logs: ConsoleLogs) -> Callable[[int], Any]:
    def open_console(number: int = 1) -> Any:
        container = machine.container(number)
        logs.open(container, str(machine.log_path(container)))
        return container

    return open_console


def test_the_log_exists_on_return(machine: Any, opened: Any) -> None:
    before = os.umask(0o177)
    try:
        vm = opened()
    finally:
        os.umask(before)
    path = machine.log_path(vm)
    assert path.read_bytes() == b""
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755


def test_a_raw_log_that_appears_later_is_followed(machine: Any, opened: Any, eventually: Eventually) -> None:
    vm = opened()
    machine.says(vm, b"hello\r\n")
    eventually(lambda: machine.pieces(vm) == [("F", b"hello")])
    machine.says(vm, b"again\r\n")
    eventually(lambda: machine.pieces(vm)[1:] == [("F", b"again")])


def test_a_rotated_raw_log_is_followed_further(machine: Any, opened: Any, eventually: Eventually) -> None:
    vm = opened()
    raw = machine.layout.console_log(vm)
    machine.says(vm, b"one\n")
    eventually(lambda: machine.text(vm) == b"one\n")
    for number in range(2, 6):
        before = machine.text(vm)
        os.replace(raw, f"{raw}.0")
        machine.says(vm, b"%d\n" % number)
        eventually(lambda before=before, number=number: machine.text(vm) == before + b"%d\n" % number)


def test_a_prompt_appears_after_a_pause(machine: Any, opened: Any, eventually: Eventually) -> None:
    vm = opened()
    machine.says(vm, b"login: ")
    eventually(lambda: machine.pieces(vm) == [("P", b"login: ")])


def test_output_from_before_open_is_written(machine: Any, opened: Any, eventually: Eventually) -> None:
    vm = machine.container()
    machine.says(vm, b"early\n")
    opened()
    eventually(lambda: machine.text(vm) == b"early\n")


def test_opening_twice_is_no_error_and_writes_once(
    machine: Any, opened: Any, logs: ConsoleLogs, eventually: Eventually
) -> None:
    vm = opened()
    opened()
    machine.says(vm, b"once\n")
    eventually(lambda: machine.text(vm) == b"once\n")
    logs.finish(vm)
    assert machine.text(vm) == b"once\n"


def test_finish_has_written_everything_when_it_returns(machine: Any, opened: Any, logs: ConsoleLogs) -> None:
    vm = opened()
    text = b"".join(b"line %d\n" % number for number in range(200_000)) + b"Powering off."
    machine.says(vm, text)
    logs.finish(vm)
    assert machine.text(vm) == text
    assert machine.pieces(vm)[-1] == ("P", b"Powering off.")
    machine.says(vm, b"nobody listens\n")
    logs.finish(vm)
    assert machine.text(vm) == text


def test_finishing_a_console_that_is_not_open_is_no_error(machine: Any, logs: ConsoleLogs) -> None:
    logs.finish(machine.container(7))


def test_opening_after_finish_continues(machine: Any, opened: Any, logs: ConsoleLogs) -> None:
    vm = opened()
    machine.says(vm, b"one\n")
    logs.finish(vm)
    machine.says(vm, b"two\n")
    opened()
    logs.finish(vm)
    assert machine.text(vm) == b"one\ntwo\n"


def test_without_a_log_file_bytes_are_discarded(machine: Any, logs: ConsoleLogs, tmp_path: Path) -> None:
    vm = machine.container()
    machine.says(vm, b"lost\n")
    logs.open(vm, "")
    logs.finish(vm)
    assert not (tmp_path / "pods").exists()


def test_a_link_in_place_of_the_log_is_refused(machine: Any, logs: ConsoleLogs, tmp_path: Path) -> None:
    vm = machine.container()
    path = machine.log_path(vm)
    path.parent.mkdir(parents=True)
    (tmp_path / "victim").write_text("precious")
    path.symlink_to(tmp_path / "victim")
    with pytest.raises(InvalidRequest, match="symbolic link"):
        logs.open(vm, str(path))
    path.unlink()
    path.symlink_to(tmp_path / "not there")
    with pytest.raises(InvalidRequest, match="symbolic link"):
        logs.open(vm, str(path))
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "not there").exists()


def test_below_the_log_directory_no_link_is_followed(machine: Any, logs: ConsoleLogs, tmp_path: Path) -> None:
    """The sandbox's log directory itself may lead over links: /var/log is one on some nodes."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "pods").symlink_to(tmp_path / "elsewhere")
    vm, other = machine.container(1), machine.container(2)
    (tmp_path / "elsewhere" / "evil").symlink_to("/etc")
    with pytest.raises(InvalidRequest, match="symbolic link"):
        logs.open(vm, str(tmp_path / "pods" / "evil" / "cron.d" / "0.log"), str(tmp_path / "pods"))
    assert not Path("/etc/cron.d/0.log").exists()
    logs.open(other, str(tmp_path / "pods" / "deep" / "er" / "0.log"), str(tmp_path / "pods"))
    made = tmp_path / "elsewhere" / "deep" / "er"
    assert (made / "0.log").is_file()
    assert [oct(path.stat().st_mode & 0o777) for path in (made.parent, made)] == ["0o755", "0o755"]


def test_a_renamed_log_is_left_alone_and_a_new_one_is_created_at_once(machine: Any, logs: ConsoleLogs) -> None:
    vm = machine.container()
    path, rotated = machine.log_path(vm), machine.log_path(vm).with_suffix(".log.1")
    logs.open(vm, str(path))
    machine.says(vm, b"old\n")
    logs.reopen(vm)  # nothing was renamed
    logs.finish(vm)
    logs.open(vm, str(path))
    path.rename(rotated)
    logs.reopen(vm)
    assert path.read_bytes() == b""
    machine.says(vm, b"new\n")
    logs.finish(vm)
    assert machine.pieces(vm) == [("F", b"new")]
    assert rotated.read_bytes().endswith(b" stdout F old\n")
    with pytest.raises(WrongState, match="not followed"):
        logs.reopen(vm)


def test_if_no_new_log_can_be_created_the_old_one_is_used_further(machine: Any, logs: ConsoleLogs) -> None:
    """kubelet then renames it back."""
    vm = machine.container()
    path, rotated = machine.log_path(vm), machine.log_path(vm).with_suffix(".log.1")
    logs.open(vm, str(path))
    path.rename(rotated)
    path.mkdir()
    with pytest.raises(WrongState, match=r"log_path: .*0\.log cannot be opened: Is a directory"):
        logs.reopen(vm)
    path.rmdir()
    rotated.rename(path)
    machine.says(vm, b"goes on\n")
    logs.finish(vm)
    assert machine.pieces(vm) == [("F", b"goes on")]


@pytest.mark.parametrize("obstacle", ["a file", "a read-only place"])
def test_a_log_directory_that_cannot_be_made_is_named(
    machine: Any, logs: ConsoleLogs, tmp_path: Path, obstacle: str
) -> None:
    (tmp_path / "taken").write_text("")
    directory = tmp_path / "taken" / "logs" if obstacle == "a file" else Path("/proc/not-there/logs")
    with pytest.raises((InvalidRequest, WrongState), match=f"log_directory {directory} cannot be made: "):
        logs.open(machine.container(), str(directory / "vm" / "0.log"), str(directory))


def test_a_log_that_is_no_file_is_refused(machine: Any, logs: ConsoleLogs) -> None:
    vm = machine.container()
    path = machine.log_path(vm)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises((InvalidRequest, WrongState), match=r"0\.log"):
        logs.open(vm, str(path))
    with pytest.raises(InvalidRequest, match="absolute"):
        logs.open(vm, "relative/0.log")


def test_a_flood_does_not_starve_others(machine: Any, make_logs: Any, eventually: Eventually) -> None:
    logs = make_logs(Pace(turn_bytes=64 * 1024, gap=0.001))
    flood, quiet = machine.container(1), machine.container(2)
    line = b"flood " * 20 + b"\n"
    machine.says(flood, line * 500_000)
    logs.open(flood, str(machine.log_path(flood)))
    eventually(lambda: machine.log_path(flood).stat().st_size > 0)
    logs.open(quiet, str(machine.log_path(quiet)))
    machine.says(quiet, b"here I am\n")
    eventually(lambda: machine.text(quiet) == b"here I am\n")
    assert machine.log_path(flood).stat().st_size < 40_000_000, "the flood was written first"


def test_a_log_that_cannot_be_written_does_not_stop_others(
    machine: Any, opened: Any, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()
    full.set()
    append = LogFile.append

    def failing(log: LogFile, text: bytes) -> None:
        if full.is_set() and b"broken" in text:
            raise OSError(28, "No space left on device")
        append(log, text)

    monkeypatch.setattr(LogFile, "append", failing)
    broken, healthy = opened(1), opened(2)
    machine.says(broken, b"broken\n")
    for number in range(3):
        machine.says(healthy, b"fine\n")
        eventually(lambda number=number: machine.text(healthy) == b"fine\n" * (number + 1))
    assert machine.text(broken) == b""
    full.clear()
    eventually(lambda: machine.text(broken) == b"broken\n")


def test_a_bug_met_by_one_console_does_not_stop_others(
    machine: Any, opened: Any, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = LogFile.append

    def buggy(log: LogFile, text: bytes) -> None:
        if b"broken" in text:
            raise ZeroDivisionError
        append(log, text)

    monkeypatch.setattr(LogFile, "append", buggy)
    broken, healthy = opened(1), opened(2)
    machine.says(broken, b"broken\n")
    machine.says(healthy, b"fine\n")
    eventually(lambda: machine.text(healthy) == b"fine\n")
    machine.says(healthy, b"fine\n")
    eventually(lambda: machine.text(healthy) == b"fine\nfine\n")


def test_a_removed_log_directory_does_not_stop_others(
    machine: Any, opened: Any, logs: ConsoleLogs, eventually: Eventually
) -> None:
    removed, healthy = opened(1), opened(2)
    path = machine.log_path(removed)
    path.unlink()
    path.parent.rmdir()
    machine.says(removed, b"into the void\n")
    machine.says(healthy, b"fine\n")
    eventually(lambda: machine.text(healthy) == b"fine\n")
    logs.finish(removed)
    assert not path.parent.exists(), "a removed pod's directory must not come back"


def test_without_inotify_consoles_are_still_followed(
    machine: Any, make_logs: Any, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fs.inotify.max_user_instances is everybody's."""

    def none_left(*args: Any, **kwargs: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("virtshim.logs.watch.INotify", none_left)
    logs = make_logs(Pace(sweep_unwatched_every=0.02))
    vm = machine.container()
    logs.open(vm, str(machine.log_path(vm)))
    for number in range(3):
        machine.says(vm, b"seen\n")
        eventually(lambda number=number: machine.text(vm) == b"seen\n" * (number + 1))


def test_output_is_followed_even_if_inotify_events_are_lost(
    machine: Any, opened: Any, eventually: Eventually, monkeypatch: Any
) -> None:
    vm = opened()
    monkeypatch.setattr("virtshim.logs.watch.RawLogWatch.reported", lambda watch: None)
    machine.says(vm, b"seen\n")
    eventually(lambda: machine.text(vm) == b"seen\n")


def test_close_stops_and_an_open_in_another_process_continues(
    machine: Any, make_logs: Any, eventually: Eventually
) -> None:
    vm = machine.container()
    first = make_logs()
    first.open(vm, str(machine.log_path(vm)))
    machine.says(vm, b"one\ntw")
    eventually(lambda: machine.text(vm).startswith(b"one\n"))
    first.close()
    first.close()
    first.finish(vm)
    with pytest.raises(Unavailable):
        first.open(vm, str(machine.log_path(vm)))
    machine.says(vm, b"o\n")
    second = make_logs()
    second.open(vm, str(machine.log_path(vm)))
    second.finish(vm)
    assert machine.text(vm) == b"one\ntwo\n"


def test_closing_gives_back_every_descriptor_and_thread(machine: Any, make_logs: Any, eventually: Eventually) -> None:
    opened = OpenedSince()
    threads = set(threading.enumerate())
    logs = make_logs()
    for number in range(20):
        vm = machine.container(number)
        machine.says(vm, b"x\n")
        logs.open(vm, str(machine.log_path(vm)))
    for number in range(10):
        logs.finish(machine.container(number))
    logs.close()
    assert opened.count() == 0
    assert set(threading.enumerate()) <= threads


def test_many_threads_open_and_finish(machine: Any, logs: ConsoleLogs) -> None:
    def life(number: int) -> None:
        vm = machine.container(number)
        for turn in range(5):
            logs.open(vm, str(machine.log_path(vm)))
            machine.says(vm, b"turn %d\n" % turn)
            logs.finish(vm)

    threads = [threading.Thread(target=life, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(16):
        assert machine.text(machine.container(number)) == b"".join(b"turn %d\n" % turn for turn in range(5))


def test_a_thousand_consoles_are_followed_at_once(machine: Any, make_logs: Any, eventually: Eventually) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 6000:
        pytest.skip("needs 6000 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 6000), hard))
    try:
        logs = make_logs()
        vms = [machine.container(number) for number in range(1000)]
        for vm in vms:
            logs.open(vm, str(machine.log_path(vm)))
        for vm in vms:
            machine.says(vm, b"hello from %b\n" % str(vm).encode())
        # Each line is some 120 bytes: there, or not.
        eventually(lambda: all(machine.log_path(vm).stat().st_size > 100 for vm in vms), seconds=120)
        for vm in vms:
            logs.finish(vm)
        for vm in vms:
            assert machine.text(vm) == b"hello from %b\n" % str(vm).encode()
    finally:
        logs.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FOLLOW = """
import sys
from virtshim.logs.follower import ConsoleLogs
from virtshim.logs.tail import Pace
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.system.clock import SystemClock
state, run, container, log = sys.argv[1:]
logs = ConsoleLogs(Layout(state, run), SystemClock(), Pace(flush_after=0.001, gap=0.0))
logs.open(ContainerId(container), log)
print("following", flush=True)
sys.stdin.read()
"""


def test_a_real_kill_neither_loses_nor_repeats_output(machine: Any, make_logs: Any, eventually: Eventually) -> None:
    vm = machine.container()
    log = machine.log_path(vm)
    chance = random.Random(1)
    command = [sys.executable, "-c", FOLLOW, machine.layout.state_dir, machine.layout.run_dir, str(vm), str(log)]
    said = b""
    for _ in range(4):
        process = subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout
        assert process.stdin
        assert process.stdout.readline() == b"following\n"
        end = time.monotonic() + chance.uniform(0.05, 0.3)
        while time.monotonic() < end:
            part = chance.randbytes(chance.randrange(1, 30_000)).replace(b"\r", b"") + b"\n" * chance.randrange(2)
            machine.says(vm, part)
            said += part
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()
    logs = make_logs()
    logs.open(vm, str(log))
    logs.finish(vm)
    assert machine.text(vm) == said
