"""A damaged database is detected, set aside, and rebuilt from its readable rows."""

import os
import sqlite3
from pathlib import Path

import pytest
from fakes.full_records import BORROWED, fill, sandbox

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import InternalError, WrongState
from virtshim.model.sandbox import SandboxPhase
from virtshim.store.damage import DatabaseDamaged
from virtshim.store.opening import open_records
from virtshim.store.records import SqliteRecords

PAGE = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def closed(records: SqliteRecords, path: Path) -> None:
    """All of it is in the one file."""
    records.close()
    with sqlite3.connect(path) as database:
        database.execute("pragma wal_checkpoint(truncate)")
    database.close()


def overwrite(path: Path, at: int, length: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(os.urandom(length))


def aside(path: Path) -> list[Path]:
    return sorted(p for p in path.parent.glob("state.db.corrupt-*") if not p.name.endswith(("-wal", "-shm")))


@pytest.mark.parametrize(
    "content", [b"no database at all, but long enough to be taken for one" * 40, b"SQLite format 3\0" * 400]
)
def test_a_file_that_is_no_database_is_renamed_and_replaced_by_a_new_one(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    records = open_records(str(path))
    assert records.sandboxes.all() == []
    assert records.trouble() == ""
    records.close()
    (kept,) = aside(path)
    assert kept.read_bytes() == content


def test_rows_on_whole_pages_survive_the_damage_of_others(path: Path) -> None:
    records = SqliteRecords(str(path))
    node = records.node_id()
    for n in range(1, 400):
        records.sandboxes.add(sandbox(n))
    closed(records, path)
    size = path.stat().st_size
    overwrite(path, (size // PAGE // 2) * PAGE, PAGE)
    with pytest.raises(DatabaseDamaged):
        SqliteRecords(str(path))
    again = open_records(str(path))
    found = {record.id for record in again.sandboxes.all()}
    assert 200 < len(found) < 399
    assert found <= {sandbox(n).id for n in range(1, 400)}
    assert again.node_id() == node
    again.close()
    assert len(aside(path)) == 1


def test_the_node_keeps_its_id_even_if_its_database_is_lost_completely(path: Path) -> None:
    records = SqliteRecords(str(path))
    node = records.node_id()
    closed(records, path)
    overwrite(path, 0, path.stat().st_size)
    again = open_records(str(path))
    assert again.node_id() == node
    again.close()


def test_a_new_database_does_not_record_a_finished_recovery(path: Path) -> None:
    """Whatever is found of the old one: the next start must look at the virtual machines themselves."""
    records = SqliteRecords(str(path))
    fill(records)
    records.set_node_fact("boot", "boot-1")
    for n in range(1, 400):
        records.sandboxes.add(sandbox(n))
    closed(records, path)
    overwrite(path, path.stat().st_size - 20 * PAGE, PAGE)
    again = open_records(str(path))
    assert again.node_fact("boot") is None
    again.close()


def test_half_made_rows_are_not_salvaged(path: Path) -> None:
    records = SqliteRecords(str(path))
    fill(records)
    assert records.containers.all()[0].phase is not ContainerPhase.CREATING
    made = records.containers.all()[0].id
    for n in range(1, 300):
        records.sandboxes.add(sandbox(n, phase=SandboxPhase.CREATING))
    closed(records, path)
    with sqlite3.connect(path) as database:
        (root,) = database.execute("select rootpage from sqlite_master where name = 'images'").fetchone()
    database.close()
    overwrite(path, (root - 1) * PAGE, PAGE)
    again = open_records(str(path))
    assert [record.id for record in again.containers.all()] == [made]
    assert len(again.sandboxes.all()) == 1
    assert again.borrowed.all() == [BORROWED]  # only this tells whose it was
    again.close()


def test_damage_under_a_running_daemon_is_reported_and_repaired_by_a_restart(path: Path) -> None:
    records = SqliteRecords(str(path))
    for n in range(1, 400):
        records.sandboxes.add(sandbox(n))
    assert records.trouble() == ""
    records.check()
    assert records.trouble() == ""
    with sqlite3.connect(path) as database:
        database.execute("pragma wal_checkpoint(truncate)")
    database.close()
    overwrite(path, 4 * PAGE, path.stat().st_size - 4 * PAGE)
    records.check()
    assert "damaged" in records.trouble()
    assert "restart virtshim" in records.trouble()
    records.close()
    again = open_records(str(path))
    assert again.trouble() == ""
    again.close()


def test_a_write_that_finds_damage_sets_the_trouble(path: Path) -> None:
    records = SqliteRecords(str(path))
    for n in range(1, 100):
        records.sandboxes.add(sandbox(n))
    with sqlite3.connect(path) as database:  # somebody else's write: what the daemon's connection remembers is old now
        database.execute("insert into node values ('x', 'y')")
    database.execute("pragma wal_checkpoint(truncate)")
    database.close()
    overwrite(path, PAGE, path.stat().st_size - PAGE)
    with pytest.raises(DatabaseDamaged, match="restart virtshim"):
        records.sandboxes.add(sandbox(100))
    assert "damaged" in records.trouble()
    assert len(records.sandboxes.all()) == 99  # lists still answer, and show what is on disk or was
    records.close()


def test_a_database_of_a_newer_schema_is_not_damaged(path: Path) -> None:
    SqliteRecords(str(path)).close()
    with sqlite3.connect(path) as database:
        database.execute("update alembic_version set version_num = '9999'")
    database.close()
    with pytest.raises(WrongState, match="9999"):
        open_records(str(path))
    assert aside(path) == []


def test_a_damaged_database_that_cannot_be_renamed_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / ("s" * 240)  # a longer name is more than the file system takes
    content = b"not a database, whatever its name may promise" * 50
    path.write_bytes(content)
    with pytest.raises(InternalError, match="cannot be renamed: File name too long"):
        open_records(str(path))
    assert path.read_bytes() == content
