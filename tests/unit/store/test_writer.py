"""On a full or unwritable disk, removals still work, and the trouble is reported."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import full_records
from sqlalchemy import event

from virtshim.model.errors import AlreadyExists, InternalError, ResourceExhausted
from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.image import DiskFormat, Image
from virtshim.store.records import SqliteRecords, open_engine

IMAGE = Image(ImageId(f"sha256:{'1' * 64}"), ImageDigest(f"sha256:{'1' * 64}"), ("a",), (), 1, 1, DiskFormat.RAW, 1)
OTHER = Image(ImageId(f"sha256:{'2' * 64}"), ImageDigest(f"sha256:{'2' * 64}"), ("b",), (), 1, 1, DiskFormat.RAW, 2)


class Disk:
    """Under a database. Once it is full, the database may grow only when the file that keeps room is gone."""

    def __init__(self, path: Path) -> None:
        self.engine = open_engine(str(path))
        self.reserve = Path(f"{path}.reserve")
        self.is_full = False

    def driver(self) -> sqlite3.Connection:
        """The one connection that the database is written through."""
        pooled = self.engine.raw_connection()
        found = pooled.driver_connection
        pooled.close()  # back to the pool of one
        assert isinstance(found, sqlite3.Connection)
        return found

    def fill(self) -> None:
        self.is_full = True

        @event.listens_for(self.engine, "begin")
        def limit(_connection: object) -> None:
            pages = 1 if self.reserve.exists() else 100_000
            self.driver().execute(f"pragma max_page_count={pages}")

    def free(self, _descriptor: int) -> int:
        return 0 if self.is_full else 1 << 40


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "state.db")


@pytest.fixture
def records(disk: Disk, tmp_path: Path) -> Iterator[SqliteRecords]:
    made = SqliteRecords(str(tmp_path / "state.db"), lambda _path: disk.engine, disk.free)
    made.images.add(IMAGE)
    yield made
    made.close()


def big(image: Image) -> Image:
    return Image(image.id, image.digest, ("x" * 100_000,), (), 1, 1, DiskFormat.RAW, 3)


def test_space_is_reserved_beside_the_database(records: SqliteRecords, disk: Disk) -> None:
    assert disk.reserve.stat().st_size == disk.reserve.stat().st_blocks * 512 == 5 << 20


def test_a_write_that_ends_something_gets_the_reserved_space(records: SqliteRecords, disk: Disk) -> None:
    disk.fill()
    records.images.replace(big(IMAGE))
    assert records.images.all() == [big(IMAGE)]
    assert not disk.reserve.exists()


def test_new_records_are_refused_until_space_is_reserved_again(records: SqliteRecords, disk: Disk) -> None:
    disk.reserve.unlink()
    disk.is_full = True
    with pytest.raises(ResourceExhausted, match="only the space left that removing pods needs"):
        records.images.add(OTHER)
    records.images.delete(IMAGE.digest)
    disk.is_full = False
    records.images.add(OTHER)
    assert disk.reserve.exists()


def test_a_full_disk_does_not_make_the_node_not_ready(records: SqliteRecords, disk: Disk) -> None:
    disk.fill()
    disk.reserve.unlink()
    disk.reserve.mkdir()  # nothing that could be given up
    with pytest.raises(ResourceExhausted):
        records.images.replace(big(IMAGE))
    assert records.trouble() == ""


def test_a_disk_that_fails_writes_is_reported_until_a_write_succeeds(records: SqliteRecords, disk: Disk) -> None:
    assert records.trouble() == ""
    disk.driver().execute("pragma query_only=on")
    with pytest.raises(InternalError, match="read-only, or failing"):
        records.images.delete(IMAGE.digest)
    assert "read-only" in records.trouble()
    assert records.images.all() == [IMAGE]
    disk.driver().execute("pragma query_only=off")
    assert records.trouble() == ""
    records.images.delete(IMAGE.digest)


def test_a_database_that_was_just_opened_syncs_each_commit(records: SqliteRecords, disk: Disk) -> None:
    assert disk.driver().execute("pragma synchronous").fetchone() == (2,)


def test_a_write_that_may_be_lost_is_not_synced_until_the_next_one(records: SqliteRecords, disk: Disk) -> None:
    sandbox = full_records.SANDBOX
    said: list[str] = []
    driver = disk.driver()
    driver.set_trace_callback(said.append)
    records.sandboxes.add(sandbox, survives_power_cuts=False)
    assert (said[0], said[1], said[-2], said[-1]) == (
        "pragma synchronous=normal", "begin immediate", "COMMIT", "pragma synchronous=full",
    )  # fmt: skip
    said.clear()
    with pytest.raises(AlreadyExists):
        records.sandboxes.add(sandbox, survives_power_cuts=False)
    assert said[-1] == "pragma synchronous=full"
    said.clear()
    records.sandboxes.replace(sandbox)
    assert not [words for words in said if "pragma" in words]
    assert driver.execute("pragma synchronous").fetchone() == (2,)
