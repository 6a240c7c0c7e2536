"""The choice of kill points is repeatable, differs with each commit, and leaves out none for ever."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kill_points import SEED_VARIABLE, commit_of, in_turn, one_in_turn, seed, strike

POINTS = range(52)


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(SEED_VARIABLE, "a commit")
    return monkeypatch


def killed_at(*, unreached: frozenset[int] = frozenset(), every: bool = False) -> list[int]:
    """The points at which a run kills."""
    tried: list[int] = []

    def kill(point: int) -> bool:
        tried.append(point)
        return point not in unreached

    strike("StopContainer virtshim", POINTS, kill, every=every, at_least=lambda taken: taken // 2)
    return tried


def test_a_seed_always_takes_the_same_point(seeded: pytest.MonkeyPatch) -> None:
    assert killed_at() == killed_at()


def test_many_commits_together_take_every_point(seeded: pytest.MonkeyPatch) -> None:
    found = set()
    for number in range(len(POINTS) * 20):
        seeded.setenv(SEED_VARIABLE, f"commit {number}")
        found.update(killed_at())
    assert found == set(POINTS)


def test_rows_of_one_run_take_different_points(seeded: pytest.MonkeyPatch) -> None:
    assert len({in_turn(POINTS, f"row {number}")[0] for number in range(20)}) > 5


def test_of_rows_that_take_turns_each_commit_runs_one_and_many_commits_run_all(seeded: pytest.MonkeyPatch) -> None:
    rows, run = ("first", "second", "third"), set()
    for number in range(60):
        seeded.setenv(SEED_VARIABLE, f"commit {number}")
        (one,) = (row.values for row in one_in_turn(rows, "libvirtd") if not row.marks)
        run.update(one)
    assert run == set(rows)


def test_another_point_is_tried_if_one_is_not_reached(seeded: pytest.MonkeyPatch) -> None:
    (first,) = killed_at()
    tried = killed_at(unreached=frozenset([first]))
    assert (len(tried), tried[0]) == (2, first)


def test_every_point_is_taken_with_all(seeded: pytest.MonkeyPatch) -> None:
    assert killed_at(every=True) == list(POINTS)


@pytest.mark.parametrize(("every", "unreached"), [(False, POINTS), (True, POINTS[:27])])
def test_a_row_with_too_few_kills_fails_and_says_how_to_repeat_it(
    seeded: pytest.MonkeyPatch, every: bool, unreached: range
) -> None:
    with pytest.raises(AssertionError, match="StopContainer virtshim") as failed:
        killed_at(unreached=frozenset(unreached), every=every)
    assert failed.value.__notes__ == [f"{SEED_VARIABLE}=a commit repeats it"]


def test_each_row_prints_the_seed(seeded: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    killed_at()
    assert f"{SEED_VARIABLE}=a commit repeats it" in capsys.readouterr().out


def test_the_default_seed_is_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(SEED_VARIABLE, raising=False)
    assert commit_of(tmp_path) == ""
    for command in ("init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m first"):
        subprocess.run(["git", "-C", tmp_path, *command.split()], check=True)
    commit_of.cache_clear()
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert commit_of(tmp_path) == head.stdout.strip()
    assert seed()
