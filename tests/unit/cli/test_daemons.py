"""A child daemon counts as started when it reports ready; its early exit is an error, and a stop certainly ends it."""

import sys
import threading

import pytest

from virtshim.cli.daemons import Daemon
from virtshim.model.errors import Unavailable

pytestmark = pytest.mark.operator

NOTIFY = "import os, socket, time; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto({!r}, os.environ['NOTIFY_SOCKET'])"


def daemon(*statements: str, **limits: float) -> Daemon:
    return Daemon("child", (sys.executable, "-ISc", "; ".join(statements)), **limits)


def says(message: bytes) -> str:
    return NOTIFY.format(message)


def test_a_daemon_counts_as_started_once_it_reports_ready() -> None:
    child = daemon(says(b"STATUS=recovering"), says(b"STATUS=serving\nREADY=1"), "time.sleep(60)")
    child.start()
    assert child.is_running
    child.stop()
    assert not child.is_running


def test_a_daemon_that_exits_before_it_is_ready_is_an_error_with_its_exit_code() -> None:
    with pytest.raises(Unavailable, match="child ended with code 3 before it was ready"):
        daemon("import sys", "sys.exit(3)").start()


def test_a_daemon_that_never_reports_ready_is_ended_with_an_error() -> None:
    child = daemon("import time", "time.sleep(60)", start_limit=0.1)
    with pytest.raises(Unavailable, match=r"not ready within 0\.1 s"):
        child.start()
    assert not child.is_running


def test_start_returns_at_once_if_a_stop_is_requested() -> None:
    stopping = threading.Event()
    stopping.set()
    child = daemon("import time", "time.sleep(60)")
    child.start(stopping)
    child.stop()
    assert not child.is_running


def test_a_daemon_that_ignores_sigterm_is_killed() -> None:
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = daemon("import signal", ignores, says(b"READY=1"), "time.sleep(60)", stop_limit=0.1)
    child.start()
    child.stop()
    assert not child.is_running


def test_stopping_a_daemon_that_does_not_run_is_no_error() -> None:
    child = daemon(says(b"READY=1"))
    child.stop()
    child.start()
    child.stop()
    child.stop()
    assert not child.is_running
