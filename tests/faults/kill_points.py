"""Chooses the points at which a run kills. Each commit takes other points, so many commits together cover all of them.

The same commit takes the same points. `VIRTSHIM_TEST_SEED` takes those of another run; a run prints its seed in its
header, with each row of points, and with each failure.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

SEED_VARIABLE = "VIRTSHIM_TEST_SEED"
_WITHOUT_A_COMMIT = "0"


def seed() -> str:
    """The seed: the commit, unless the environment names another one."""
    return os.environ.get(SEED_VARIABLE) or commit_of(Path(__file__).parent) or _WITHOUT_A_COMMIT


@functools.cache
def commit_of(directory: Path) -> str:
    """The commit of the repository that contains the directory, "" if there is none."""
    # A checkout may belong to another user than the one who runs the tests.
    command = ["git", "-c", "safe.directory=*", "-C", str(directory), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def how_to_repeat() -> str:
    return f"{SEED_VARIABLE}={seed()} repeats it"


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """A failure inside the block says how to repeat it."""
    try:
        yield
    except Exception as error:
        error.add_note(how_to_repeat())
        raise


def in_turn(points: Sequence[T], row: str) -> list[T]:
    """All points in the order in which this run tries them. Rows have independent orders."""
    order = list(points)
    random.Random(f"{seed()} {row}").shuffle(order)
    return order


def one_in_turn(rows: Sequence[str], of: str) -> list[Any]:
    """Parameters for rows that are much alike and take long: each commit takes another one of them, and `--all` every one."""
    first = in_turn(rows, of)[0]
    return [pytest.param(row, marks=() if row == first else pytest.mark.full) for row in rows]


def strike(
    row: str, points: Sequence[T], kill: Callable[[T], bool], *, every: bool, at_least: Callable[[int], int]
) -> None:
    """Kills at one point of the row, or at `every` one. `kill` returns whether the call reached that point. A call does
    not reach each point every time; the next one is tried then.

    `at_least`: how many kills must happen when all points are taken.
    """
    taken, killed = 0, 0
    with repeatable():
        for point in points if every else in_turn(points, row):
            killed += kill(point)
            taken += 1
            if killed and not every:
                break
        print(f"KILLS {row}: {killed}, {taken} points taken of {len(points)}; {how_to_repeat()}")
        wanted = at_least(taken) if every else 1
        assert killed >= wanted, f"{row}: of {taken} points {killed} were reached, and {wanted} should be"
