"""Notes about a pod's disk that cannot be read do not count as absent."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

import pytest

from virtshim.disks.disk_places import DiskPlacesFiles
from virtshim.model.errors import InternalError
from virtshim.model.hardware import Firmware, Places
from virtshim.model.layout import Layout

DISK = f"{'a' * 64}/{'b' * 64}"


def layout(tmp_path: Path) -> Layout:
    made = Layout(state_dir=str(tmp_path), run_dir="/run/virtshim")
    Path(made.pod_disk(DISK)).parent.mkdir(parents=True)
    return made


def no_descriptor(*_args: object, **_options: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_disk_without_places_has_none_yet(tmp_path: Path) -> None:
    assert DiskPlacesFiles(layout(tmp_path)).read(DISK) == Places()


def test_unreadable_places_are_an_error_and_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = DiskPlacesFiles(layout(tmp_path))
    places.keep(DISK, Places())
    monkeypatch.setattr("io.open", no_descriptor)
    with pytest.raises(InternalError, match="cannot be read"):
        places.read(DISK)


def test_unreadable_firmware_notes_are_an_error_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = DiskPlacesFiles(layout(tmp_path))
    monkeypatch.setattr("os.stat", no_descriptor)
    with pytest.raises(InternalError, match="cannot be read"):
        places.firmware(DISK, next(iter(Firmware)))


def test_a_tpm_with_unreadable_owners_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places, vm = DiskPlacesFiles(layout(tmp_path)), uuid.uuid4()
    places.keep_tpm(DISK, vm)
    assert places.tpm_owners(vm) == {"a" * 64}
    monkeypatch.setattr("io.open", no_descriptor)
    with pytest.raises(InternalError, match="cannot be read"):
        places.tpm_owners(vm)
