"""Copies in memory, and copies on disk for root only, fulfil the contract of RecordCopies."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.disks import FakeRecordCopies, FakeRootDisks

from virtshim.disks.ports import RootDisks
from virtshim.disks.root_disks import RootDiskStore
from virtshim.model.errors import InternalError
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.store.copies import RecordCopyFiles
from virtshim.store.ports import RecordCopies

C = ContainerId("c" * 64)


@dataclass
class World:
    copies: RecordCopies
    disks: RootDisks


def in_memory(_: Path) -> World:
    disks = FakeRootDisks()
    return World(FakeRecordCopies(disks), disks)


def on_disk(directory: Path) -> World:
    layout = Layout(str(directory / "state"), str(directory / "run"))
    return World(RecordCopyFiles(layout), RootDiskStore(layout))


@pytest.fixture(params=[in_memory, on_disk], ids=["in_memory", "on_disk"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    make: Callable[[Path], World] = request.param
    made = make(tmp_path)
    made.disks.make_directory(C)
    return made


def test_the_last_text_written_is_read(world: World) -> None:
    world.copies.keep(C, "a long first one")
    world.copies.keep(C, "second")
    assert world.copies.read(C) == "second"


def test_a_missing_copy_of_records_reads_as_empty(world: World) -> None:
    assert world.copies.read(C) == ""
    assert world.copies.read(ContainerId("d" * 64)) == ""


def test_a_copy_is_deleted_with_its_containers_directory(world: World) -> None:
    world.copies.keep(C, "text")
    world.disks.delete(C)
    assert world.copies.read(C) == ""


@pytest.mark.hostile
def test_only_root_can_read_a_copy_whatever_the_umask(tmp_path: Path) -> None:
    world = on_disk(tmp_path)
    before = os.umask(0)
    try:
        world.disks.make_directory(C)
        world.copies.keep(C, "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / f"state/containers/{C}/record.json").stat().st_mode) == 0o600


@pytest.mark.hostile
def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    world = on_disk(tmp_path)
    world.disks.make_directory(C)
    (tmp_path / "shadow").write_text("root's")
    (tmp_path / f"state/containers/{C}/record.json").symlink_to(tmp_path / "shadow")
    with pytest.raises(InternalError):
        world.copies.keep(C, "text")
    with pytest.raises(InternalError):
        world.copies.read(C)
    assert (tmp_path / "shadow").read_text() == "root's"
