"""Orphans are reaped at once; own children are left to the code that started them."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.operator

# The test needs a separate process, because a subreaper stays one for its life. `family` runs a child that leaves a
# grandchild behind. The grandchild ends when the pipe that it reads from is closed.
PROLOGUE = """
import os, subprocess, sys, time
from virtshim.cli.daemons import Orphans
orphans = Orphans()

def start(*argv, **options):
    return orphans.start_child(lambda: subprocess.Popen(argv, **options))

def family(release):
    done = subprocess.PIPE
    script = 'sh -c "read x <&$0" & echo $!'
    child = start("sh", "-c", script, str(release), stdout=done, pass_fds=[release], text=True)
    grandchild = int(child.stdout.readline())
    assert child.wait(20) == 0
    return grandchild

def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)

def parent_of(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
"""


def run(script: str) -> None:
    source = PROLOGUE + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_an_orphan_becomes_a_child_and_is_reaped_when_it_ends() -> None:
    run("""
        orphans.adopt()
        reading, writing = os.pipe()
        orphan = family(reading)
        until(lambda: parent_of(orphan) == os.getpid())
        os.close(writing)
        os.close(reading)
        until(lambda: not os.path.exists(f"/proc/{orphan}"))
    """)


def test_exit_codes_of_own_children_are_kept_however_soon_they_end() -> None:
    run("""
        orphans.adopt()
        for code in range(60):
            child = start("sh", "-c", f"exit {code}")
            if code % 3 == 0:
                time.sleep(0.01)
            assert child.wait(20) == code
            assert child.poll() == code
    """)


def test_waiting_for_children_uses_no_cpu_time() -> None:
    run("""
        orphans.adopt()
        assert start("true").wait(20) == 0
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1
        assert start("sh", "-c", "exit 7").wait(20) == 7
    """)
