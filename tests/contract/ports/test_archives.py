"""The fake and the real archives on disk fulfil the contract of CheckpointFiles."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
from fakes.archives import FakeArchives

from virtshim.disks.checkpoint_archives import MANIFEST, CheckpointArchives
from virtshim.model.errors import DeadlineExceeded, InternalError, InvalidRequest
from virtshim.model.ids import ContainerId
from virtshim.vm.ports import CheckpointFiles

A = ContainerId("a" * 64)
B = ContainerId("b" * 64)
WORDS = b'{"format": 1}\n'


class World:
    """`source` is the file that is copied."""

    archives: CheckpointFiles

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.source = str(directory / "disk")

    def place(self, name: str = "one.tar") -> str:
        return str(self.directory / name)

    def manifest(self, location: str) -> bytes | None:
        """The manifest of a finished archive, None if there is none."""
        raise NotImplementedError

    def names(self, directory: str) -> list[str] | None:
        """The file names in the directory, None if it does not exist."""
        raise NotImplementedError


class InMemory(World):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.archives = self._fake = FakeArchives()

    def manifest(self, location: str) -> bytes | None:
        return self._fake.finished.get(location)

    def names(self, directory: str) -> list[str] | None:
        if directory not in self._fake.directories:
            return None
        return [os.path.basename(path) for path in self._fake.files if os.path.dirname(path) == directory]


class OnDisk(World):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.archives = CheckpointArchives()
        Path(self.source).write_bytes(b"content")

    def manifest(self, location: str) -> bytes | None:
        if not os.path.exists(location):
            return None
        with tarfile.open(location) as tar:
            found = tar.extractfile(MANIFEST)
            assert found is not None
            return found.read()

    def names(self, directory: str) -> list[str] | None:
        return os.listdir(directory) if os.path.isdir(directory) else None


@pytest.fixture(params=[InMemory, OnDisk])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    made: World = request.param(tmp_path)
    return made


def go_on() -> None:
    """The time limit is not reached."""


def time_is_over() -> None:
    raise DeadlineExceeded("time is over")


def test_an_archive_appears_only_when_it_is_finished(world: World) -> None:
    directory = world.archives.begin(world.place(), A)
    assert world.names(directory) == []
    world.archives.copy(world.source, f"{directory}/root.qcow2", go_on)
    assert world.names(directory) == ["root.qcow2"]
    assert world.manifest(world.place()) is None
    world.archives.finish(world.place(), A, WORDS, go_on)
    assert world.manifest(world.place()) == WORDS


def test_a_discarded_archive_is_gone_and_discarding_may_be_repeated(world: World) -> None:
    directory = world.archives.begin(world.place(), A)
    world.archives.copy(world.source, f"{directory}/root.qcow2", go_on)
    for _ in range(2):
        world.archives.discard(world.place(), A)
        assert world.names(directory) is None


def test_a_finished_archive_outlives_its_directory(world: World) -> None:
    directory = world.archives.begin(world.place(), A)
    world.archives.finish(world.place(), A, WORDS, go_on)
    world.archives.discard(world.place(), A)
    assert world.names(directory) is None
    assert world.manifest(world.place()) == WORDS


def test_an_archive_does_not_contain_leftovers_of_an_earlier_one(world: World) -> None:
    directory = world.archives.begin(world.place(), A)
    world.archives.copy(world.source, f"{directory}/root.qcow2", go_on)
    assert world.archives.begin(world.place(), A) == directory
    assert world.names(directory) == []


def test_checkpoints_of_two_containers_are_separate(world: World) -> None:
    first, second = (world.archives.begin(world.place(name), one) for name, one in (("a.tar", A), ("b.tar", B)))
    assert first != second
    world.archives.discard(world.place("a.tar"), A)
    assert world.names(second) == []


@pytest.mark.parametrize("bad", ["one.tar", "", "/somewhere/"])
def test_an_impossible_location_is_refused(world: World, bad: str) -> None:
    with pytest.raises(InvalidRequest):
        world.archives.begin(bad, A)


def test_an_archive_that_was_not_begun_cannot_be_finished(world: World) -> None:
    with pytest.raises(InternalError):
        world.archives.finish(world.place(), A, WORDS, go_on)
    assert world.manifest(world.place()) is None


def test_an_archive_that_runs_out_of_time_is_not_created(world: World) -> None:
    world.archives.begin(world.place(), A)
    with pytest.raises(DeadlineExceeded):
        world.archives.finish(world.place(), A, WORDS, time_is_over)
    assert world.manifest(world.place()) is None
