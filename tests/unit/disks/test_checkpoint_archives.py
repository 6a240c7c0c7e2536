"""Checkpoint archives are complete or absent, only root can read them, and they leave no other files."""

from __future__ import annotations

import os
import stat
import tarfile
from pathlib import Path

import pytest

from virtshim.disks.checkpoint_archives import CheckpointArchives
from virtshim.model.errors import DeadlineExceeded, InternalError, InvalidRequest, ResourceExhausted
from virtshim.model.ids import ContainerId

ID = ContainerId("ab" * 32)
MANIFEST = b'{"format": 1}\n'


@pytest.fixture
def archives() -> CheckpointArchives:
    return CheckpointArchives()


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "one.tar")


def go_on() -> None:
    """Time is not over."""


def time_is_over() -> None:
    raise DeadlineExceeded("time is over")


def test_the_archive_has_everything_gathered_with_the_manifest_first(archives, place: str, tmp_path: Path) -> None:
    source = tmp_path / "disk"
    source.write_bytes(os.urandom(9 << 20))
    directory = archives.begin(place, ID)
    archives.copy(str(source), f"{directory}/root.qcow2", go_on)
    Path(directory, "memory.save").write_bytes(b"memory")
    archives.finish(place, ID, MANIFEST, go_on)
    archives.discard(place, ID)
    with tarfile.open(place) as tar:
        assert tar.getnames() == ["checkpoint.json", "memory.save", "root.qcow2"]
        contents = [tar.extractfile(name).read() for name in tar.getnames()]
        assert {member.mode for member in tar.getmembers()} == {0o600}
    assert contents == [MANIFEST, b"memory", source.read_bytes()]
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["disk", "one.tar"]


def test_the_staging_directory_is_for_its_owner_only(archives, place: str) -> None:
    directory = archives.begin(place, ID)
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    assert os.path.dirname(directory) == os.path.dirname(place)


def test_leftovers_of_an_earlier_archive_do_not_get_into_the_next(archives, place: str) -> None:
    Path(archives.begin(place, ID), "old").write_text("x")
    assert os.listdir(archives.begin(place, ID)) == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("one.tar", "absolute"),
        ("{dir}/", "absolute"),
        ("{dir}/a\0b", "absolute"),
        ("{dir}/missing/one.tar", "there is no directory"),
        ("{dir}/disk/one.tar", "there is no directory"),
        ("{dir}", "is not a file"),
    ],
)
def test_an_impossible_archive_path_is_refused(archives, tmp_path: Path, bad: str, says: str) -> None:
    (tmp_path / "disk").write_text("")
    with pytest.raises(InvalidRequest, match=says):
        archives.begin(bad.format(dir=tmp_path), ID)
    assert os.listdir(tmp_path) == ["disk"]


def test_a_link_is_not_followed(archives, place: str, tmp_path: Path) -> None:
    os.symlink("/etc/passwd", place)
    with pytest.raises(InvalidRequest, match="is not a file"):
        archives.begin(place, ID)
    directory = archives.begin(str(tmp_path / "other.tar"), ID)
    os.symlink("/etc/passwd", f"{directory}/root.qcow2")
    with pytest.raises(InternalError):
        archives.copy("/etc/hostname", f"{directory}/root.qcow2", go_on)


def test_an_archive_appears_only_when_it_is_whole(archives, place: str, tmp_path: Path) -> None:
    Path(place).write_text("an earlier one")
    directory = archives.begin(place, ID)
    Path(directory, "memory.save").write_bytes(bytes(1 << 20))
    with pytest.raises(DeadlineExceeded):
        archives.finish(place, ID, MANIFEST, time_is_over)
    archives.discard(place, ID)
    assert Path(place).read_text() == "an earlier one"
    assert os.listdir(tmp_path) == ["one.tar"]


def test_a_copy_ends_at_its_deadline(place: str, tmp_path: Path) -> None:
    archives = CheckpointArchives(lambda _old, _new: False)
    source = tmp_path / "disk"
    source.write_bytes(b"x")
    with pytest.raises(DeadlineExceeded):
        archives.copy(str(source), archives.begin(place, ID) + "/root.qcow2", time_is_over)


def test_a_full_disk_is_reported_as_such(place: str, tmp_path: Path) -> None:
    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    archives = CheckpointArchives(full)
    (tmp_path / "disk").write_text("x")
    with pytest.raises(ResourceExhausted, match="no space"):
        archives.copy(str(tmp_path / "disk"), archives.begin(place, ID) + "/root.qcow2", go_on)


def test_discarding_twice_or_with_nothing_there_is_no_error(archives, place: str) -> None:
    archives.begin(place, ID)
    archives.discard(place, ID)
    archives.discard(place, ID)
    archives.discard("/no/such/directory/x.tar", ID)
