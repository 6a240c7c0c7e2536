"""Programs run cleanly, and nothing of them is left when the call returns."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path

import pytest
from leaks import OpenedSince, runs
from podclient import wait_until

from virtshim.model.errors import DeadlineExceeded, InternalError
from virtshim.system.process import Finished, piped, run


def test_a_programs_output_and_exit_code_are_returned() -> None:
    done = run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout=10)
    assert done == Finished(3, b"out\n", b"err\n")
    assert done.summary() == "err"


def test_a_program_gets_a_clean_environment_closed_stdin_and_its_own_group(monkeypatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    script = "cat; umask; pwd; env | sort; test $(ps -o pgid= -p $$) = $$ && echo own"
    lines = run(["sh", "-c", script], timeout=10, environment={"EXTRA": "1"}).stdout.decode().splitlines()
    assert lines[:2] == ["0077", "/"]
    assert lines[-1] == "own"
    names = {line.partition("=")[0] for line in lines[2:-1]}
    assert names - {"PWD", "_", "SHLVL", "OLDPWD"} == {"EXTRA", "LC_ALL", "PATH"}


@pytest.mark.parametrize("how", ["timeout", "cancel", "end"])
def test_no_process_of_the_group_survives_the_call(tmp_path: Path, how: str) -> None:
    """A child in the background holds the pipes; it neither delays the call nor survives it."""
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! > {pids}; {'exit 0' if how == 'end' else 'wait'}"
    cancelled = threading.Event()
    timer = threading.Timer(0.3, cancelled.set)
    if how == "end":
        assert run(["sh", "-c", script], timeout=60).returncode == 0
    elif how == "timeout":
        with pytest.raises(DeadlineExceeded, match="sh took too long"):
            run(["sh", "-c", script], timeout=0.3)
    else:
        timer.start()
        with pytest.raises(DeadlineExceeded, match="gave up"):
            run(["sh", "-c", script], timeout=60, cancelled=cancelled)
        timer.join()
    wait_until(lambda: not runs(int(pids.read_text())), 5, "the child is gone")


def test_output_is_limited_and_read_to_its_end() -> None:
    done = run(["sh", "-c", "head -c 50000000 /dev/zero; echo end >&2"], timeout=30, output_limit=1000)
    assert (len(done.stdout), done.stderr, done.returncode) == (1000, b"end\n", 0)


def test_a_signal_is_a_negative_code_and_output_is_made_printable() -> None:
    done = run(["sh", "-c", "printf 'a\\033[31m\\377b\\nc'; kill -9 $$"], timeout=10)
    assert done.returncode == -9
    assert done.summary().isprintable()
    assert run(["false"], timeout=10).summary() == "no output, exit code 1"


@pytest.mark.parametrize("argv", [["no-such-program-here"], ["/etc/passwd"], ["true", "a\0b"]])
def test_a_program_that_cannot_be_started_is_an_error(argv: list[str]) -> None:
    with pytest.raises(InternalError, match="cannot run"):
        run(argv, timeout=10)


def test_a_running_program_can_be_written_to_and_read_from() -> None:
    with piped(["sh", "-c", "read line; echo got $line; echo err >&2; exit 3"]) as program:
        os.write(program.feed, b"this\n")
        assert select.select([program.answers], [], [], 10)[0]
        assert os.read(program.answers, 100) == b"got this\n"
        assert program.end(10) == Finished(3, b"", b"err\n")


@pytest.mark.parametrize("how", ["left", "waited for"])
def test_a_piped_program_is_not_left_behind(how: str) -> None:
    opened = OpenedSince()
    with piped(["sh", "-c", "echo $$; exec sleep 600"]) as program:
        assert select.select([program.answers], [], [], 60)[0]
        pid = int(os.read(program.answers, 100))
        if how == "waited for":
            assert program.end(0.1).returncode == -9
    assert not runs(pid)
    assert opened.count() == 0


def test_a_program_gets_the_descriptors_that_are_meant_for_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("held")
    with open(tmp_path / "file", "rb") as file:
        assert run(["cat", f"/proc/self/fd/{file.fileno()}"], timeout=10, pass_fds=(file.fileno(),)).stdout == b"held"
        assert run(["cat", f"/proc/self/fd/{file.fileno()}"], timeout=10).returncode != 0


def test_no_descriptor_is_left_open() -> None:
    run(["true"], timeout=10)
    opened = OpenedSince()
    for _ in range(5):
        run(["true"], timeout=10)
        with pytest.raises(InternalError):
            run(["no-such-program-here"], timeout=10)
    assert opened.count() == 0
