"""A damaged database is replaced in steps, and a kill at any step loses nothing."""

import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fakes.full_records import BORROWED, fill, sandbox
from sqlalchemy import Engine, event

from virtshim.store.opening import open_records
from virtshim.store.records import SqliteRecords

PAGE = 4096
_hears: list[Callable[[], object]] = []
# Python's audit events, which come before each step.
_STEPS = ("open", "os.rename", "os.remove", "sqlite3.connect")


def _audited(name: str, arguments: tuple[Any, ...]) -> None:
    """It cannot be taken away again."""
    if _hears and name in _STEPS and "state.db" in str(arguments[0]):
        _hears[-1]()


sys.addaudithook(_audited)


@contextmanager
def each_step(hear: Callable[[], object]) -> Iterator[None]:
    """Inside the block it hears of each change of a database file before it is made."""

    def commits(_connection: object) -> None:
        _hears[-1]()

    _hears.append(hear)
    event.listen(Engine, "commit", commits)
    try:
        yield
    finally:
        event.remove(Engine, "commit", commits)
        _hears.pop()


def damaged(path: Path) -> str:
    """With rows that only it knows, and newest changes in its log. The node's id."""
    records = SqliteRecords(str(path))
    fill(records)
    for n in range(1, 4):
        records.sandboxes.add(sandbox(n))
    node = records.node_id()
    records.close()
    with sqlite3.connect(path) as database:
        (root,) = database.execute("select rootpage from sqlite_master where name = 'images'").fetchone()
        database.execute("pragma wal_autocheckpoint=0")
        database.execute("insert into node values ('written', 'lately')")
        database.commit()
        shutil.copytree(path.parent, path.parent.parent / "copy")  # a clean end would empty the log
    database.close()
    shutil.rmtree(path.parent)
    (path.parent.parent / "copy").rename(path.parent)
    with path.open("r+b") as file:
        file.seek((root - 1) * PAGE)
        file.write(b"\xff" * PAGE)
    return node


def what_is_known(records: SqliteRecords) -> tuple[Any, ...]:
    return (
        sorted(one.id for one in records.sandboxes.all()),
        sorted(one.id for one in records.containers.all()),
        records.borrowed.all(),
        records.device_conditions.all(),
        records.node_fact("id"),
    )


def test_a_kill_at_any_step_of_the_salvage_loses_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    path = state / "state.db"
    node = damaged(path)
    log = Path(f"{path}-wal").read_bytes()
    assert log
    snapshots: list[Path] = []

    def snapshot() -> None:
        _hears.append(lambda: None)
        snapshots.append(tmp_path / f"killed-{len(snapshots)}")
        shutil.copytree(state, snapshots[-1])
        _hears.pop()

    with each_step(snapshot):
        records = open_records(str(path))
    whole = what_is_known(records)
    records.close()
    assert whole[2] == [BORROWED]
    assert whole[4] == node
    assert len(snapshots) > 15
    for killed in snapshots:
        records = open_records(str(killed / "state.db"))
        assert what_is_known(records) == whole, killed.name
        assert records.node_fact("boot") is None, killed.name
        records.close()
        left = sorted(file.name for file in killed.iterdir() if "-shm" not in file.name)
        assert not [name for name in left if ".new" in name], left
        (aside,) = [name for name in left if ".corrupt-" in name and name.endswith("Z")]
        assert (killed / f"{aside}-wal").read_bytes() == log, "the damaged one is kept with its log"
