"""A command gets all its input in parallel with its output, and blocks no thread."""

from __future__ import annotations

import socket
import threading

from fakes.waiting import eventually

from virtshim.guest.command_output import CommandOutput
from virtshim.guest.guest_exec import RunningCommand


def is_fed() -> bool:
    return "exec-input" in {thread.name for thread in threading.enumerate()}


def test_a_guest_that_never_reads_holds_no_thread_when_the_command_is_over() -> None:
    ours, guests = socket.socketpair()
    with guests:
        running = RunningCommand("token", (), CommandOutput("token", stderr=True), stdin=ours)
        running.feed(bytes(5_000_000))
        assert is_fed()
        running.close()
        running.close()
        eventually(lambda: not is_fed())
