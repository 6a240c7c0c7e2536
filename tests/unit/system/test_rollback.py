"""Undo steps run in reverse, all of them, and are forgotten on success."""

import pytest

from virtshim.model.errors import InternalError
from virtshim.system.rollback import Rollback


def test_undo_runs_in_reverse() -> None:
    done: list[str] = []
    undo = Rollback()
    for step in "abc":
        undo.add(step, lambda step=step: done.append(step))
    with pytest.raises(InternalError), undo:
        raise InternalError("no")
    assert done == ["c", "b", "a"]
    assert undo.clean


def test_after_commit_nothing_is_undone() -> None:
    done: list[str] = []
    with Rollback() as undo:
        undo.add("a", lambda: done.append("a"))
        undo.commit()
    assert done == []


def test_without_commit_everything_is_undone_even_without_an_error() -> None:
    done: list[str] = []
    with Rollback() as undo:
        undo.add("a", lambda: done.append("a"))
    assert done == ["a"]


def test_a_failed_undo_step_does_not_keep_the_others_from_running_nor_hide_the_error() -> None:
    done: list[str] = []

    def fails() -> None:
        raise ValueError("undo failed")

    undo = Rollback()
    undo.add("a", lambda: done.append("a"))
    undo.add("b", fails)
    undo.add("c", lambda: done.append("c"))
    with pytest.raises(InternalError, match="the reason"), undo:
        raise InternalError("the reason")
    assert done == ["c", "a"]
    assert not undo.clean


def test_an_undo_step_knows_whether_earlier_undo_steps_worked() -> None:
    seen: list[bool] = []

    def fails() -> None:
        raise ValueError("undo failed")

    with Rollback() as undo:
        undo.add("looks", lambda: seen.append(undo.clean))
        undo.add("fails", fails)
        undo.add("looks", lambda: seen.append(undo.clean))
    assert seen == [True, False]
