"""The fakes and the real files on disk fulfil the contract of GuestSeeds and TerminationFiles."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.disks import FakeGuestSeeds, FakeRootDisks
from fakes.guests import FakeTerminationFiles

from virtshim.annotations.options import VmOptions
from virtshim.disks.container_files import TerminationFileStore
from virtshim.disks.ports import RootDisks
from virtshim.disks.root_disks import RootDiskStore
from virtshim.guest.ports import TerminationFiles
from virtshim.model.errors import InternalError
from virtshim.model.ids import ContainerId
from virtshim.model.image import DiskFormat
from virtshim.model.layout import Layout
from virtshim.model.network import Dns
from virtshim.model.sandbox import PodKey
from virtshim.seed.iso import SeedStore
from virtshim.seed.ports import GuestSeeds, SeedRequest

A = ContainerId("a" * 64)
UID = "0f3a"
REQUEST = SeedRequest(A, PodKey("ns", "pod", "uid", 0), "pod", VmOptions(), (), Dns())

# --- seeds


@pytest.fixture(params=["fake", "real"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[GuestSeeds, RootDisks]:
    """Seeds, and the disks whose directories contain them."""
    if request.param == "fake":
        disks = FakeRootDisks()
        return FakeGuestSeeds(disks), disks
    layout = Layout(str(tmp_path / "state"), str(tmp_path / "run"))
    return SeedStore(layout), RootDiskStore(layout)


def test_a_seed_is_a_cdrom_in_the_containers_directory_and_is_deleted_with_it(
    stores: tuple[GuestSeeds, RootDisks],
) -> None:
    seeds, disks = stores
    disk = seeds.create(REQUEST)
    assert (disk.format, disk.serial, disk.readonly, disk.cdrom) == (DiskFormat.RAW, "seed", True, True)
    assert disks.existing() == {A}
    disks.delete(A)
    assert disks.existing() == frozenset()


def test_a_seed_may_be_made_again(stores: tuple[GuestSeeds, RootDisks]) -> None:
    seeds, disks = stores
    disks.make_directory(A)
    assert seeds.create(REQUEST) == seeds.create(REQUEST)


# --- last words


class LastWords:
    """`path` is kubelet's file."""

    files: TerminationFiles
    path: str

    def remove(self) -> None:
        raise NotImplementedError

    def read(self) -> bytes:
        raise NotImplementedError


class InMemory(LastWords):
    def __init__(self, directory: Path) -> None:
        self.files = self._fake = FakeTerminationFiles()
        self.path = str(directory / "7f")

    def remove(self) -> None:
        self._fake.missing.add(self.path)

    def read(self) -> bytes:
        return self._fake.written[self.path]


class OnDisk(LastWords):
    def __init__(self, directory: Path) -> None:
        self.files = TerminationFileStore()
        self._file = directory / "pods" / UID / "containers" / "vm" / "7f"
        self._file.parent.mkdir(parents=True)
        self._file.touch()
        self.path = str(self._file)

    def remove(self) -> None:
        self._file.unlink()

    def read(self) -> bytes:
        return self._file.read_bytes()


@pytest.fixture(params=[InMemory, OnDisk])
def last_words(request: pytest.FixtureRequest, tmp_path: Path) -> LastWords:
    made: LastWords = request.param(tmp_path)
    return made


def test_a_termination_message_replaces_the_files_contents(last_words: LastWords) -> None:
    last_words.files.write(last_words.path, UID, b"a long goodbye")
    last_words.files.write(last_words.path, UID, b"the end")
    assert last_words.read() == b"the end"


def test_a_missing_termination_file_is_not_created(last_words: LastWords) -> None:
    last_words.remove()
    with pytest.raises(InternalError):
        last_words.files.write(last_words.path, UID, b"the end")
