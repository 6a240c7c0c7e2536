"""A host file that cannot be read now does not count as absent."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from virtshim.devices.host_files import HostFiles
from virtshim.model.errors import Unavailable

READS: list[Callable[[HostFiles], object]] = [
    lambda files: files.text("/sys/file"),
    lambda files: files.head("/sys/file", 4),
    lambda files: files.names("/sys"),
]


def out_of(code: int) -> Callable[..., None]:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize("read", READS)
def test_a_missing_file_reads_as_empty(tmp_path: Path, read: Callable[[HostFiles], object]) -> None:
    assert not read(HostFiles(str(tmp_path)))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("read", READS)
def test_a_file_that_cannot_be_read_now_does_not_read_as_empty(
    tmp_path: Path, read: Callable[[HostFiles], object], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = HostFiles(str(tmp_path))
    monkeypatch.setattr("builtins.open", out_of(code))
    monkeypatch.setattr("os.listdir", out_of(code))
    with pytest.raises(Unavailable, match="cannot be read now"):
        read(files)


def test_an_attribute_that_its_driver_does_not_support_reads_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = HostFiles(str(tmp_path))
    monkeypatch.setattr("builtins.open", out_of(errno.EIO))
    assert files.text("/sys/file") == ""
