"""tapmanager notifies systemd through the notify socket."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapmanager.daemon import notify_systemd, watchdog_seconds


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        yield sock


def test_lines_arrive_as_one_datagram(listener: socket.socket, tmp_path: Path) -> None:
    listener.bind(str(tmp_path / "notify"))
    assert notify_systemd("READY=1", "STATUS=serving", environ={"NOTIFY_SOCKET": str(tmp_path / "notify")})
    assert listener.recv(4096) == b"READY=1\nSTATUS=serving"


def test_an_abstract_address_is_understood(listener: socket.socket) -> None:
    listener.bind(f"\0virtshim-test-{os.getpid()}")
    assert notify_systemd("WATCHDOG=1", environ={"NOTIFY_SOCKET": f"@virtshim-test-{os.getpid()}"})
    assert listener.recv(4096) == b"WATCHDOG=1"


def test_a_line_break_in_a_text_does_not_make_another_assignment(listener: socket.socket, tmp_path: Path) -> None:
    listener.bind(str(tmp_path / "notify"))
    notify_systemd("STATUS=first\nREADY=1", environ={"NOTIFY_SOCKET": str(tmp_path / "notify")})
    assert listener.recv(4096) == b"STATUS=first READY=1"


@pytest.mark.parametrize("address", [None, "", "relative", "vsock:2:1234"])
def test_nothing_is_sent_without_a_notify_socket_of_a_known_kind(address: str | None) -> None:
    assert not notify_systemd("READY=1", environ={} if address is None else {"NOTIFY_SOCKET": address})


def test_a_listener_that_is_gone_is_no_error(tmp_path: Path) -> None:
    assert not notify_systemd("READY=1", environ={"NOTIFY_SOCKET": str(tmp_path / "nobody")})


def test_a_full_queue_does_not_hold_the_daemon_up(listener: socket.socket, tmp_path: Path) -> None:
    listener.bind(str(tmp_path / "notify"))
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    for _ in range(10_000):
        if not notify_systemd("WATCHDOG=1", environ=environ):
            return
    pytest.fail("the queue never filled")


def test_the_environment_of_the_process_is_the_default(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener.bind(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    assert notify_systemd("STOPPING=1")
    assert listener.recv(4096) == b"STOPPING=1"


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "me"}, None),
    ],
)
def test_the_watchdog_seconds_is_the_one_set_for_this_process(environ: dict[str, str], seconds: float | None) -> None:
    assert watchdog_seconds(environ) == seconds


# Raises SIGTERM at each line of the code that waits, over more than two waits.
SIGNAL_AT_EVERY_LINE = """
import signal, sys, threading
from tapmanager.daemon import stop_event

def stopped_at(line):
    stopping, left = stop_event(), [line]
    def trace(frame, event, argument):
        if frame.f_code.co_filename != threading.__file__:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGTERM)
        return trace
    sys.settrace(trace)
    while not stopping.wait(0.01):
        pass
    sys.settrace(None)

for line in range(1, 41):
    stopped_at(line)
    print(line)
"""


def test_a_signal_at_any_line_of_a_wait_for_it_ends_the_wait() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SIGNAL_AT_EVERY_LINE], check=True, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.split()[-1:] == ["40"]
