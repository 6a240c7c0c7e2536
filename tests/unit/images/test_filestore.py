"""The image store keeps its files, cleans up, and reports its use of disk space."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from fakes.webserver import LOOPBACK

from virtshim.images import disk_writer
from virtshim.images.disk_writer import DiskWriter
from virtshim.images.downloads.room import Room, Share
from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.model.errors import InternalError, InvalidRequest, ResourceExhausted
from virtshim.model.ids import ImageDigest

NEVER = threading.Event()
HEX = "ab" * 32


def test_an_empty_store_answers_before_its_directory_exists(tmp_path: Path) -> None:
    store = ImageFileStore(str(tmp_path / "none"), ImageSettings(insecure_registries=LOOPBACK))
    assert store.stored() == frozenset()
    assert store.filesystem_usage().used_bytes == 0
    assert store.path(ImageDigest(f"sha256:{HEX}")) == f"{tmp_path}/none/sha256/{HEX}"
    store.delete(ImageDigest(f"sha256:{HEX}"))


def test_a_sweep_removes_half_made_files_and_stale_memories_only(web, store, qcow2: bytes, tmp_path: Path) -> None:
    digest = store.fetch(web.serve("/x.qcow2", qcow2, ETag='"1"'), None, NEVER).digest
    images = tmp_path / "images"
    (images / "incoming" / "half").write_bytes(b"x")
    (images / "known" / "bad").write_bytes(b"x")
    (images / "known" / "stale").write_text(f"sha256:{HEX}\n")
    store.sweep()
    assert list((images / "incoming").iterdir()) == []
    assert len(list((images / "known").iterdir())) == 1
    assert store.stored() == {digest}


def test_only_complete_regular_files_are_stored(store, tmp_path: Path) -> None:
    files = tmp_path / "images" / "sha256"
    (files / "notes").write_text("x")
    (files / ("c" * 64)).mkdir()
    (files / ("d" * 64)).symlink_to("/etc/passwd")
    (files / HEX).write_bytes(b"x")
    assert store.stored() == {ImageDigest(f"sha256:{HEX}")}


def test_stored_files_can_be_opened_by_name_but_not_listed(store, tmp_path: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "images").iterdir()}
    assert modes == {
        "sha256": 0o711,
        "incoming": 0o700,
        "trees": 0o700,
        "partial": 0o700,
        "known": 0o700,
        "boot": 0o700,
    }
    assert (tmp_path / "images").stat().st_mode & 0o777 == 0o711


def test_use_counts_allocated_bytes_and_inodes_and_names_a_mount_point(store, tmp_path: Path) -> None:
    before = store.filesystem_usage()
    sparse = tmp_path / "images" / "sha256" / HEX
    with sparse.open("wb") as file:
        file.truncate(1 << 30)
        file.write(b"x" * 4096)
        os.fsync(file.fileno())
    after = store.filesystem_usage()
    assert after.inodes_used == before.inodes_used + 1
    assert 4096 <= after.used_bytes - before.used_bytes < 1 << 20
    assert os.path.ismount(after.mountpoint)
    assert after.timestamp >= before.timestamp


def test_a_damaged_stored_file_is_replaced(web, store, qcow2: bytes) -> None:
    url = web.serve("/x.qcow2", qcow2)
    path = Path(store.path(store.fetch(url, None, NEVER).digest))
    path.write_bytes(b"cut")
    store.fetch(url, None, NEVER)
    assert path.read_bytes() == qcow2


@pytest.mark.parametrize("reference", ["", f"sha256:{HEX}", HEX, "a b", "ftp://x/y", "virtlet.cloud/alone"])
def test_a_bad_reference_is_refused_before_anything_is_touched(store, reference: str) -> None:
    with pytest.raises(InvalidRequest):
        store.fetch(reference, None, NEVER)


def test_an_unusable_image_is_not_stored(web, store, incoming) -> None:
    with pytest.raises(InvalidRequest, match="web page"):
        store.fetch(web.serve("/x.qcow2", b"<html>"), None, NEVER)
    assert store.stored() == frozenset()
    assert incoming() == []


def test_a_full_disk_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with DiskWriter(tmp_path / "x", "img", 1 << 62, Share(Room())) as disk:
        disk.expect(1 << 61)
        with pytest.raises(ResourceExhausted, match="does not fit"):
            disk.write(b"QFI\xfb")
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(ResourceExhausted, match="free some space"):
            disk.write(b"x")


def test_a_raw_disk_needs_space_only_for_its_data(tmp_path: Path) -> None:
    with DiskWriter(tmp_path / "x", "img", 1 << 62, Share(Room())) as disk:
        disk.expect(1 << 61)
        for data in (b"\0", b"boot", bytes(1 << 18)):
            disk.write(data)
        disk.finish()
        assert (tmp_path / "x").stat().st_blocks * 512 < 1 << 16 < disk.size


def test_two_disks_written_at_once_do_not_reserve_the_same_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_writer, "free_bytes", lambda _: 1000)
    room = Room()
    one, two = (DiskWriter(tmp_path / name, name, 1 << 62, Share(room)) for name in ("one", "two"))
    with two:
        with one:
            one.expect(600)
            one.write(b"QFI\xfb")
            two.expect(600)
            with pytest.raises(ResourceExhausted, match="'two' does not fit"):
                two.write(b"QFI\xfb")
            # What is written is no longer free, and no longer promised.
            one.write(b"1" * 496)
            monkeypatch.setattr(disk_writer, "free_bytes", lambda _: 500)
            two.restart()
            two.expect(400)
            two.write(b"QF")
            two.write(b"I\xfb")
        monkeypatch.setattr(disk_writer, "free_bytes", lambda _: 1000)
        two.restart()
        two.expect(1000)
        two.write(b"QFI\xfb")


def test_a_store_that_cannot_be_written_is_an_internal_error(web, tmp_path: Path, qcow2: bytes) -> None:
    (tmp_path / "file").write_text("")
    store = ImageFileStore(str(tmp_path / "file" / "images"), ImageSettings(insecure_registries=LOOPBACK))
    with pytest.raises(InternalError, match="Not a directory"):
        store.fetch(web.serve("/x.qcow2", qcow2), None, NEVER)


def test_an_image_is_written_to_disk_while_it_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that little is left to wait for at its end."""
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(disk_writer, "begin_sync", lambda _, first, count: begun.append((first, count)))
    with DiskWriter(tmp_path / "disk", "x", 1 << 30, Share(Room())) as disk:
        for _ in range(40):
            disk.write(b"x" * (1 << 20))
        disk.finish()
    assert begun == [(0, 16 << 20), (16 << 20, 16 << 20)]
