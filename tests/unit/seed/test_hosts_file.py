"""virtshim reads kubelet's hosts file where kubelet keeps it, and reads nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from virtshim.seed.iso import read_hosts_file

UID = "7d1b0f5e-0c3b-4a0e-8a9c-0d2f5d0e8a11"
TEXT = b"10.88.0.5\tweb\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kubelet" / "pods" / UID / "etc-hosts"
    path.parent.mkdir(parents=True)
    path.write_bytes(TEXT)
    return path


def test_the_pods_hosts_file_is_read(file: Path) -> None:
    assert read_hosts_file(str(file), UID) == TEXT


def test_another_pods_hosts_file_is_not_read(file: Path) -> None:
    assert read_hosts_file(str(file), "another-uid") == b""
    assert read_hosts_file("", UID) == b""


def test_links_fifos_and_endless_files_are_not_read(file: Path, tmp_path: Path) -> None:
    secret = tmp_path / "shadow"
    secret.write_text("root:x")
    file.unlink()
    assert read_hosts_file(str(file), UID) == b""
    file.symlink_to(secret)
    assert read_hosts_file(str(file), UID) == b""
    file.unlink()
    os.mkfifo(file)
    assert read_hosts_file(str(file), UID) == b""
    file.unlink()
    file.write_bytes(b"x" * (1 << 20))
    assert read_hosts_file(str(file), UID) == b""
