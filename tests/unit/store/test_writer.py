"""A full disk, and one that cannot be written: removal goes on, and who asks is told."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import full_records

from virtshim.domain.errors import AlreadyExists, InternalError, ResourceExhausted
from virtshim.domain.ids import ImageDigest, ImageId
from virtshim.domain.image import DiskFormat, Image
from virtshim.store.records import SqliteRecords

IMAGE = Image(ImageId(f"sha256:{'1' * 64}"), ImageDigest(f"sha256:{'1' * 64}"), ("a",), (), 1, 1, DiskFormat.RAW, 1)
OTHER = Image(ImageId(f"sha256:{'2' * 64}"), ImageDigest(f"sha256:{'2' * 64}"), ("b",), (), 1, 1, DiskFormat.RAW, 2)


class Disk:
    """What SQLite may take of it: at once nothing more, and as if the file that keeps room were it."""

    def __init__(self, records: SqliteRecords, path: Path) -> None:
        self.records = records
        self.reserve = Path(f"{path}.reserve")

    def pragma(self, words: str) -> None:
        connection = self.records._engine.raw_connection()
        connection.cursor().execute(f"pragma {words}")
        connection.close()  # back to the pool of one

    def fill(self) -> None:
        self.pragma("max_page_count=1")


@pytest.fixture
def records(tmp_path: Path) -> Iterator[SqliteRecords]:
    made = SqliteRecords(str(tmp_path / "state.db"))
    made.images.add(IMAGE)
    yield made
    made.close()


@pytest.fixture
def disk(records: SqliteRecords, tmp_path: Path) -> Disk:
    return Disk(records, tmp_path / "state.db")


def big(image: Image) -> Image:
    return Image(image.id, image.digest, ("x" * 100_000,), (), 1, 1, DiskFormat.RAW, 3)


def test_room_is_kept_beside_the_database(disk: Disk) -> None:
    assert disk.reserve.stat().st_size == disk.reserve.stat().st_blocks * 512 == 5 << 20


def test_a_write_that_ends_something_gets_the_room_that_was_kept(
    records: SqliteRecords, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.fill()
    unlink = os.unlink

    def unlink_and_make_room(path: str) -> None:
        unlink(path)
        disk.pragma("max_page_count=100000")

    monkeypatch.setattr("virtshim.store.writer.os.unlink", unlink_and_make_room)
    records.images.replace(big(IMAGE))
    assert records.images.all() == [big(IMAGE)]
    assert not disk.reserve.exists()


def test_nothing_new_is_taken_in_until_room_is_kept_again(
    records: SqliteRecords, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.reserve.unlink()
    monkeypatch.setattr("virtshim.store.writer._RESERVE", 1 << 60)
    with pytest.raises(ResourceExhausted, match="full but for what removing pods needs"):
        records.images.add(OTHER)
    records.images.delete(IMAGE.digest)
    monkeypatch.undo()
    records.images.add(OTHER)
    assert disk.reserve.exists()


def test_a_full_disk_is_no_trouble_of_the_node(records: SqliteRecords, disk: Disk) -> None:
    disk.fill()
    with pytest.raises(ResourceExhausted):
        records.images.replace(big(IMAGE))
    assert records.trouble() == ""


def test_a_disk_that_takes_no_writes_is_told_until_it_does_again(records: SqliteRecords, disk: Disk) -> None:
    assert records.trouble() == ""
    disk.pragma("query_only=on")
    with pytest.raises(InternalError, match="read-only, or failing"):
        records.images.delete(IMAGE.digest)
    assert "read-only" in records.trouble()
    assert records.images.all() == [IMAGE]
    disk.pragma("query_only=off")
    assert records.trouble() == ""
    records.images.delete(IMAGE.digest)


def test_a_write_that_a_power_cut_may_take_is_committed_without_a_sync_and_the_next_one_with(
    records: SqliteRecords,
) -> None:
    sandbox = full_records.SANDBOX
    said: list[str] = []
    connection = records._engine.raw_connection()
    driver = connection.driver_connection
    connection.close()
    assert driver is not None
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
