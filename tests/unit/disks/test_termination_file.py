"""The termination message goes to kubelet's file for it and to no other file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from virtshim.disks.container_files import TerminationFileStore
from virtshim.model.errors import InvalidRequest, ShimError

UID = "0f3a"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """As kubelet makes it, below a directory that is a link."""
    (tmp_path / "data").mkdir()
    (tmp_path / "kubelet").symlink_to("data")
    made = tmp_path / "kubelet" / "pods" / UID / "containers" / "vm" / "7f"
    made.parent.mkdir(parents=True)
    made.touch(0o666)
    return made


def write(path: Path, message: bytes = b"the end") -> None:
    TerminationFileStore().write(str(path), UID, message)


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_link_below_the_pods_directory_is_not_followed(file: Path, tmp_path: Path, what: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "7f").write_bytes(b"precious")
    if what == "file":
        file.unlink()
        file.symlink_to(victim / "7f")
    else:
        file.unlink()
        file.parent.rmdir()
        file.parent.symlink_to(victim)
    with pytest.raises(ShimError):
        write(file)
    assert (victim / "7f").read_bytes() == b"precious"


def test_only_a_regular_file_with_one_name_is_written(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    file.unlink()
    os.link(other, file)
    with pytest.raises(InvalidRequest):
        write(file)
    assert other.read_bytes() == b"precious"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ShimError):
        write(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(ShimError):
        write(file)


def test_no_link_is_followed_in_a_path_outside_of_pods(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    TerminationFileStore().write(str(tmp_path / "plain"), UID, b"said")
    assert (tmp_path / "plain").read_bytes() == b"said"
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").touch()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ShimError):
        TerminationFileStore().write(str(tmp_path / "link" / "file"), UID, b"said")
