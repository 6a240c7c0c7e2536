"""The leak check ignores the processes of isolated test runs, and these runs do not see other processes."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from leaks import Snapshot, runs
from podclient import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

APART = str(Path(__file__).parents[1] / "apart.sh")
_NAME = "qemu-system-that-was-left"


@contextlib.contextmanager
def lingering(*before: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A lingering program with a name of ours: the started process, by way of `before`, and its process id."""
    with subprocess.Popen([*before, "bash", "-c", f"exec -a {_NAME} sleep 600"]) as process:
        try:
            wait_until(lambda: len(those_left()) == 1, 30, "it runs")
            yield process, those_left()[0]
        finally:
            process.kill()


def those_left() -> list[int]:
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_left(pid)]


def is_left(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_NAME.encode())
    except OSError:
        return False


def left_of(before: Snapshot) -> Sequence[str]:
    return [found for found in before.left() if _NAME in found]


def test_the_leak_check_sees_a_process_that_a_test_left() -> None:
    before = Snapshot.take()
    with lingering():
        assert len(left_of(before)) == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_processes_in_another_pid_namespace_are_ignored_and_end_with_their_parent(how: signal.Signals) -> None:
    before = Snapshot.take()
    with lingering(APART) as (process, inside):
        assert left_of(before) == []
        process.send_signal(how)
        wait_until(lambda: not runs(inside), 30, "the inner process ended")


def test_an_isolated_run_has_its_own_network_and_temporary_files() -> None:
    script = (
        "ls -A /var/tmp /run/netns; ls /sys/class/net; touch /var/tmp/virtshim-left; ip link add left type veth; exit 3"
    )
    mounts = Path("/proc/self/mounts").read_text()
    done = subprocess.run([APART, "sh", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.split() == ["/run/netns:", "/var/tmp:", "lo"]
    assert not Path("/var/tmp/virtshim-left").exists()
    assert not Path("/sys/class/net/left").exists()
    assert Path("/proc/self/mounts").read_text() == mounts
