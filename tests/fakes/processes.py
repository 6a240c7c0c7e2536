"""Hung processes, made by SIGSTOP."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from fakes.journal import WAIT_LIMIT
from podclient import wait_until


def hang(pid: int) -> None:
    """Stops the process; returns when none of its threads runs.

    `kill` returns earlier: one thread takes the signal when it gets the processor, and only then stops the others, which
    answer calls until then.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(_state(task) in "TtZX" for task in tasks.iterdir()), WAIT_LIMIT, f"process {pid} is stopped")


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"  # ended since it was listed


@contextlib.contextmanager
def hanging(*pids: int) -> Iterator[None]:
    """The processes hang inside the block. One that has ended by then is skipped."""
    for pid in pids:
        hang(pid)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
