"""Kernels from an image's /boot are stored and removed with its disk."""

import contextlib
import hashlib
import platform
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.clock import FakeClock
from fakes.registry import FakeRegistry

from virtshim.images.confined import contents
from virtshim.images.disk_writer import DiskWriter
from virtshim.images.downloads.room import Room, Share
from virtshim.images.filestore import ImageFileStore
from virtshim.images.kernels import ArrivingBoot
from virtshim.images.service import ImageService
from virtshim.model.errors import InvalidRequest
from virtshim.model.ids import ImageDigest
from virtshim.model.image import NO_DISK, NO_DISK_BYTES, BootFile, DiskFormat
from virtshim.store.copies import ImageNoteFiles
from virtshim.store.records import SqliteRecords

NEVER = threading.Event()


@pytest.fixture(autouse=True)
def amd64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def pull(store: ImageFileStore) -> Callable[[str], Any]:
    return lambda name: store.fetch(name, None, NEVER)


def boot_file(path: str, content: bytes) -> BootFile:
    return BootFile(path, ImageDigest(f"sha256:{hashlib.sha256(content).hexdigest()}"), len(content))


def test_kernels_are_stored_with_the_disk_for_root_only(
    fake_registry: FakeRegistry, pull: Callable[[str], Any], store: ImageFileStore, qcow2: bytes
) -> None:
    found = pull(
        fake_registry.push("a", {"boot/": b"", "boot/vmlinuz": b"K" * 700, "disk/x": qcow2, "boot/initrd": b"I"})
    )
    assert found.digest.hex == hashlib.sha256(qcow2).hexdigest()
    assert found.boot == (boot_file("/boot/initrd", b"I"), boot_file("/boot/vmlinuz", b"K" * 700))
    kernel = Path(store.boot.path(found.boot[1].digest))
    assert kernel.read_bytes() == b"K" * 700
    assert kernel.stat().st_mode & 0o777 == 0o600
    assert store.boot.stored() == {one.digest for one in found.boot}
    assert store.stored() == {found.digest, found.tree}, "they are no disks"


@pytest.mark.parametrize(
    "trees",
    [
        pytest.param([{"boot/k": b"old"}, {"boot/k": b"new"}], id="replaced above"),
        pytest.param([{"boot/x": b"old"}, {"boot/.wh.x": b"", "boot/k": b"new"}], id="whited out above"),
        pytest.param([{"boot/x": b"old"}, {"boot/.wh..wh..opq": b"", "boot/k": b"new"}], id="opaque directory"),
        pytest.param([{"boot/x": b"old"}, {".wh.boot": b""}, {"./boot/k": b"new"}], id="directory whited out"),
        pytest.param([{"boot/x/": b"", "boot/k": b"new", "boot/x/k": b"deep"}], id="in a directory"),
        pytest.param([{"boot/k": b"new", "boot/empty": b"", "boot/-k": b"-", "boot/a b": b"-"}], id="odd ones"),
        pytest.param([{"boot/k": b"new", "etc/boot/x": b"-", "bootx": b"-", "boot.d/x": b"-"}], id="elsewhere"),
    ],
)
def test_kernels_are_taken_from_the_merged_layers(
    fake_registry: FakeRegistry, pull: Callable[[str], Any], qcow2: bytes, trees: list[dict[str, bytes]]
) -> None:
    assert pull(fake_registry.push("a", {"disk/x": qcow2}, *trees)).boot == (boot_file("/boot/k", b"new"),)


def test_many_files_in_directories_below_boot_are_accepted(
    fake_registry: FakeRegistry, pull: Callable[[str], Any], qcow2: bytes
) -> None:
    tree = {f"boot/grub/i386-pc/{number}.mod": b"m" for number in range(1500)}
    assert pull(fake_registry.push("a", {"disk/x": qcow2} | tree)).boot == ()


def test_files_that_are_too_large_or_too_many_for_kernels_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MOST_BOOT_BYTES", 100)
    monkeypatch.setattr(contents, "MOST_BOOT_TOTAL", 150)
    monkeypatch.setattr(contents, "MOST_BOOT_FILES", 3)
    search = contents.BootSearch("it")

    def is_taken(name: str, size: int) -> bool:
        entry = contents.TarEntry(f"boot/{name}", contents.EntryKind.FILE, size)
        return search.takes(search.shown(entry), entry)

    sizes = {"a": 101, "b": 100, "c": 51, "d": 30, "e": 20, "f": 0}
    assert [name for name, size in sizes.items() if is_taken(name, size)] == ["b", "d", "e"]
    assert not is_taken("g", 0)
    assert [is_taken(name, 0) for name in "hi"] == [False, False]


def test_links_are_not_taken_as_kernels(
    fake_registry: FakeRegistry,
    pull: Callable[[str], Any],
    make_tar: Callable[..., bytes],
    qcow2: bytes,
    tmp_path: Path,
) -> None:
    with tarfile.open(tmp_path / "layer", "w") as archive:
        for name, target in (("boot/vmlinuz", "vmlinuz-6"), ("boot/passwd", "/etc/passwd")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
    plain = (tmp_path / "layer").read_bytes()
    below = make_tar({"disk/x": qcow2, "boot/passwd": b"not seen"})
    fake_registry.manifest("a", [(below, below), (plain, plain)])
    assert pull(fake_registry.name("a")).boot == ()


def test_an_image_that_has_a_kernel_needs_no_disk(
    fake_registry: FakeRegistry, pull: Callable[[str], Any], store: ImageFileStore
) -> None:
    found = pull(fake_registry.push("a", {"boot/vmlinuz": b"kernel"}))
    assert (found.digest, found.format, found.virtual_size) == (NO_DISK, DiskFormat.RAW, NO_DISK_BYTES)
    disk = Path(store.path(found.digest))
    assert disk.read_bytes() == bytes(NO_DISK_BYTES)
    assert disk.stat().st_blocks == 0
    assert found.boot == (boot_file("/boot/vmlinuz", b"kernel"),)


def test_two_kernels_of_one_name_in_a_layer_are_refused(
    fake_registry: FakeRegistry, pull: Callable[[str], Any], qcow2: bytes
) -> None:
    with pytest.raises(InvalidRequest, match="/boot/k twice in one layer"):
        pull(fake_registry.push("a", {"disk/x": qcow2, "boot/k": b"1", "./boot/k": b"2"}))


def test_a_known_image_is_downloaded_again_only_if_a_kernel_is_missing(
    fake_registry: FakeRegistry, pull: Callable[[str], Any], store: ImageFileStore, qcow2: bytes
) -> None:
    name = fake_registry.push("a", {"disk/x": qcow2, "boot/k": b"kernel"})
    first = pull(name)
    asked = len(fake_registry.web.paths())
    assert pull(name) == first
    assert len(fake_registry.web.paths()) == asked + 2, "manifest and config"
    store.boot.keep_only(frozenset())
    assert store.boot.stored() == frozenset()
    assert pull(name) == first
    assert len(store.boot.stored()) == 1


def test_a_kernel_is_removed_with_the_last_image_that_has_it(
    fake_registry: FakeRegistry, store: ImageFileStore, qcow2: bytes, tmp_path: Path
) -> None:
    with contextlib.closing(SqliteRecords(str(tmp_path / "state.db"))) as records:
        images = ImageService(records, store, ImageNoteFiles(str(tmp_path / "notes")), FakeClock())
        shared, own = {"boot/k": b"shared"}, {"boot/i": b"own"}
        first = images.pull(fake_registry.push("a", {"disk/x": qcow2} | shared | own), None, NEVER)
        second = images.pull(fake_registry.push("b", {"disk/x": qcow2} | shared), None, NEVER)
        assert first.digest == second.digest
        assert {one.path for one in first.boot} == {"/boot/k", "/boot/i"}
        images.remove(first.id.value)
        assert store.boot.stored() == {second.boot[0].digest}
        images.collect_all()
        assert images.all() == [second]
        Path(store.boot.path(second.boot[0].digest)).unlink()
        images.collect_all()
        assert images.all() == [], "kubelet pulls it again"


def test_after_a_lost_database_existing_kernels_are_known_again(
    fake_registry: FakeRegistry, store: ImageFileStore, qcow2: bytes, tmp_path: Path
) -> None:
    notes = ImageNoteFiles(str(tmp_path / "notes"))
    with contextlib.closing(SqliteRecords(str(tmp_path / "state.db"))) as records:
        images = ImageService(records, store, notes, FakeClock())
        image = images.pull(fake_registry.push("a", {"disk/x": qcow2, "boot/k": b"kernel"}), None, NEVER)
    with contextlib.closing(SqliteRecords(str(tmp_path / "second.db"))) as records:
        images = ImageService(records, store, notes, FakeClock())
        images.adopt()
        assert images.all() == [image]
    store.boot.keep_only(frozenset())
    with contextlib.closing(SqliteRecords(str(tmp_path / "third.db"))) as records:
        images = ImageService(records, store, notes, FakeClock())
        images.adopt()
        (found,) = images.all()
        assert (found.boot, found.tags) == ((), ()), "its bare disk"
        assert found.digest == image.digest


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("/boot/../etc/passwd", "1"),
        ("boot/k", "1"),
        ("/boot/a/b", "1"),
        ("/boot/k\n", "1"),
        ("/boot/k", "0"),
        ("/boot/k", "-1"),
        ("/boot/k", "9" * 30),
        ("/boot/k", str((512 << 20) + 1)),
    ],
)
def test_a_compromised_child_cannot_write_other_files(path: str, size: str, tmp_path: Path) -> None:
    arriving = ArrivingBoot(lambda: pytest.fail("it was opened"))
    with pytest.raises(ValueError, match="a file"):
        arriving.begin(path, size)
    assert arriving.is_empty


def test_a_kernel_is_stored_completely_or_not_at_all(tmp_path: Path) -> None:
    with DiskWriter(tmp_path / "k", "it", 1 << 20, Share(Room())) as writer:
        arriving = ArrivingBoot(lambda: writer)
        assert not arriving.takes(b"the disk's")
        arriving.begin("/boot/k", "3")
        assert arriving.takes(b"ab")
        with pytest.raises(ValueError, match="not whole"):
            arriving.finished()
        with pytest.raises(ValueError, match="out of order"):
            arriving.begin("/boot/i", "3")
        with pytest.raises(ValueError, match="more than"):
            arriving.takes(b"cd")
        assert arriving.takes(b"c")
        assert not arriving.takes(b"the disk's")
        with pytest.raises(ValueError, match="out of order"):
            arriving.begin("/boot/k", "3")
        assert arriving.finished() == [(boot_file("/boot/k", b"abc"), tmp_path / "k")]
