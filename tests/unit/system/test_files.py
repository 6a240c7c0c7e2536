"""Files are replaced as a whole, counted and locked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from virtshim.system.files import FileLocked, free_bytes, lock_file, lock_holder, replace_text, space_taken, sync


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_text(str(path), "one")
    assert path.stat().st_mode & 0o777 == 0o600
    replace_text(str(path), "two")
    assert (path.read_text(), os.listdir(tmp_path)) == ("two", ["file"])


def test_a_link_at_the_new_files_path_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file.new").symlink_to(tmp_path / "elsewhere")
    replace_text(str(tmp_path / "file"), "text")
    assert (tmp_path / "file").read_text() == "text"
    assert not (tmp_path / "elsewhere").exists()


def test_holes_and_missing_files_take_no_space(tmp_path: Path) -> None:
    (tmp_path / "full").write_bytes(b"x" * (1 << 16))
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 30)
    sync(tmp_path / "full")
    used, inodes = space_taken([tmp_path / "full", tmp_path / "hole", tmp_path / "gone"])
    assert (1 << 16 <= used < 1 << 20, inodes) == (True, 2)


def test_a_file_with_several_names_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"x" * (1 << 16))
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    sync(tmp_path / "one")
    assert space_taken([tmp_path / "one", tmp_path / "two"]) == space_taken([tmp_path / "two"])


def test_a_directory_can_be_synced_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    sync(tmp_path / "link")
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "gone")


def test_free_space_is_that_of_the_files_file_system(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        assert 0 < free_bytes(descriptor) <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    finally:
        os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        free_bytes(tmp_path / "gone")


def test_a_lock_names_its_holder_until_it_is_closed(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    assert lock_holder(path) == 0
    descriptor = lock_file(path)
    with pytest.raises(FileLocked) as caught:
        lock_file(path)
    assert caught.value.holder == lock_holder(path) == os.getpid()
    os.close(descriptor)
    os.close(lock_file(path))


def test_a_replaced_files_name_is_on_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", note)
    replace_text(str(tmp_path / "file"), "text")
    assert synced == [str(tmp_path / "file.new"), str(tmp_path)]
