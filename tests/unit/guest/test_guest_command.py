"""Commands in guests have clear error messages and valid scripts."""

import subprocess

import pytest

from virtshim.guest import exec_scripts
from virtshim.guest.command import too_late


def test_the_message_for_a_timed_out_command_says_that_it_did_not_end_in_time() -> None:
    assert too_late(30, 0.2) == "the command did not end within 30 s; it was killed"


def test_the_message_for_a_command_that_began_late_says_how_its_time_was_spent() -> None:
    said = too_late(30, 29.4)
    assert said.startswith("the command was killed after 0.6 s: 29.4 of its 30 s had passed when the agent came up")


def test_an_ordinary_commands_script_is_short() -> None:
    """An emulated guest's agent reads it slowly, once for each command."""
    assert len(exec_scripts.run_script("0" * 32, as_user=False, tty=False)) < 1300


@pytest.mark.parametrize("as_user", [False, True])
@pytest.mark.parametrize("tty", [False, True])
def test_a_shell_can_read_each_script(as_user: bool, tty: bool) -> None:
    script = exec_scripts.run_script("0" * 32, as_user=as_user, tty=tty)
    subprocess.run(["/bin/sh", "-n", "-c", script], check=True, timeout=30)
