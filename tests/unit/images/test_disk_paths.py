"""The operator can configure another path than /disk for the disk of a containerDisk."""

import dataclasses
import hashlib
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.clock import FakeClock
from fakes.registry import FakeRegistry

from virtshim.images.filestore import ImageFileStore
from virtshim.images.names import RegistryLocation, resolve
from virtshim.images.policy import DiskPath, place_of_disk
from virtshim.images.service import ImageService
from virtshim.model.errors import InvalidRequest
from virtshim.model.image_name import ImageName
from virtshim.store.copies import ImageNoteFiles
from virtshim.store.records import SqliteRecords

NEVER = threading.Event()
OTHER = b"\xeb\x3c" + bytes(1022)


@pytest.fixture(autouse=True)
def amd64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def pull(make_store: Callable[..., ImageFileStore]) -> Callable[[str, str], Any]:
    def run(name: str, path: str) -> Any:
        return make_store(disk_paths=(DiskPath("", path),)).fetch(name, None, NEVER)

    return run


@pytest.mark.parametrize(
    ("path", "trees"),
    [
        ("/images/vm.qcow2", [{"images/vm.qcow2": b"DISK", "images/other.img": OTHER, "disk/x": OTHER}]),
        ("/images/vm.qcow2", [{"./images/vm.qcow2": b"DISK"}]),
        ("/images", [{"images/": b"", "images/vm.qcow2": b"DISK"}]),
        ("/vm.qcow2", [{"vm.qcow2": b"DISK", "README": b"text"}]),
        ("/a/b/vm", [{"a/b/vm": OTHER}, {"a/b/vm": b"DISK"}]),
        ("/a/b/vm", [{"a/b/vm": OTHER}, {"a/.wh.b": b"", "a/b/vm": b"DISK"}]),
        ("/a/b", [{"a/b/old": OTHER}, {"a/.wh..wh..opq": b"", "a/b/vm": b"DISK"}]),
        ("/a/b", [{"a/b/old": OTHER}, {".wh.a": b"", "a/b/vm": b"DISK"}]),
        ("/a/b", [{"a/b/old": OTHER}, {"a": b"a file"}, {"a/": b"", "a/b/vm": b"DISK"}]),
    ],
)
def test_the_disk_is_taken_from_the_configured_path(
    fake_registry: FakeRegistry, pull: Callable[[str, str], Any], qcow2: bytes, path: str, trees: list[dict[str, bytes]]
) -> None:
    real = [{name: qcow2 if data == b"DISK" else data for name, data in tree.items()} for tree in trees]
    assert pull(fake_registry.push("a", *real), path).digest.hex == hashlib.sha256(qcow2).hexdigest()


@pytest.mark.parametrize(
    ("path", "trees", "why"),
    [
        ("/images", [{"disk/vm": OTHER}], r"no file below /images; .* \(images\.disk_paths\)"),
        ("/images/vm", [{"images/vm2": OTHER}], "no file below /images/vm"),
        ("/images", [{"images/a": OTHER, "images/b": OTHER}], "two files below /images"),
        ("/a/b/vm", [{"a/b/vm": OTHER}, {"a": b"a file"}], "no file below /a/b/vm"),
        ("/a/b/vm", [{"a/b/vm": OTHER}, {".wh.a": b""}], "no file below /a/b/vm"),
        ("/a/b/vm", [{"a/b/vm": OTHER}, {".wh..wh..opq": b""}], "no file below /a/b/vm"),
    ],
)
def test_an_image_without_a_disk_at_the_configured_path_is_refused(
    fake_registry: FakeRegistry, pull: Callable[[str, str], Any], path: str, trees: list[dict[str, bytes]], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        pull(fake_registry.push("a", *trees), path)


def test_another_path_is_another_disk_of_the_same_image(
    fake_registry: FakeRegistry, pull: Callable[[str, str], Any], qcow2: bytes
) -> None:
    name = fake_registry.push("a", {"one": qcow2, "two": OTHER})
    assert [pull(name, path).digest.hex for path in ("/one", "/two", "/one")] == [
        hashlib.sha256(data).hexdigest() for data in (qcow2, OTHER, qcow2)
    ]


def test_several_disks_of_one_image_are_separate_images(
    fake_registry: FakeRegistry, make_store: Callable[..., ImageFileStore], qcow2: bytes, tmp_path: Path
) -> None:
    """By their config alone they were one, with the disk of the last pull."""
    tree = {"disk/vm": qcow2, "one": OTHER, "two": OTHER + bytes(512)}
    names = {place: fake_registry.push(place, tree) for place in ("disk", "one", "two")}
    store = make_store(disk_paths=tuple(DiskPath(names[place], f"/{place}") for place in ("one", "two")))
    records = SqliteRecords(str(tmp_path / "state.db"))
    images = ImageService(records, store, ImageNoteFiles(str(tmp_path / "notes")), FakeClock())
    pulled = {place: images.pull(name, None, NEVER) for place, name in names.items()}
    assert len({image.id for image in pulled.values()}) == 3
    for place, image in pulled.items():
        assert images.find(names[place]) == images.find(image.id.value) == image
        assert Path(store.path(image.digest)).read_bytes() == tree.get(place, qcow2)
    images.remove(pulled["one"].id.value)
    assert images.find(names["one"]) is None
    assert {image.id for image in images.all()} == {pulled["disk"].id, pulled["two"].id}
    # The trees are the same file or not, by the second in which each image was pushed.
    assert store.stored() == {one for place in ("disk", "two") for one in (pulled[place].digest, pulled[place].tree)}
    records.close()


def test_a_new_pull_takes_the_name_from_an_image_of_an_earlier_version(
    fake_registry: FakeRegistry, make_store: Callable[..., ImageFileStore], qcow2: bytes, tmp_path: Path
) -> None:
    tree = {"disk/vm": qcow2, "one": OTHER}
    plain, placed = fake_registry.push("plain", tree), fake_registry.push("placed", tree)
    records = SqliteRecords(str(tmp_path / "state.db"))
    store = make_store(disk_paths=(DiskPath(placed, "/one"),))
    images = ImageService(records, store, ImageNoteFiles(str(tmp_path / "notes")), FakeClock())
    new = images.pull(placed, None, NEVER)
    by_config = make_store().fetch(plain, None, NEVER).id
    records.images.delete(new.id)
    records.images.put(dataclasses.replace(new, id=by_config))
    found = images.find(placed)
    assert found is not None
    assert found.id == by_config, "it is served until it is pulled again"
    assert images.pull(placed, None, NEVER).id == new.id
    assert {image.id for image in images.all()} == {new.id}
    assert images.pull(plain, None, NEVER).id == by_config
    assert {digest for image in images.all() for digest in (image.digest, image.tree)} == store.stored()
    records.close()


def test_the_same_disk_from_two_registries_is_one_image(
    fake_registry: FakeRegistry, pull: Callable[[str, str], Any], qcow2: bytes
) -> None:
    assert (
        pull(fake_registry.push("a", {"vm": qcow2}), "/vm").id == pull(fake_registry.push("b", {"vm": qcow2}), "/vm").id
    )


def test_the_longest_prefix_decides_the_disk_path() -> None:
    paths = [DiskPath("reg.example", "/images"), DiskPath("reg.example/team", "/vm/"), DiskPath("other.example", "/x")]
    for name, place in (("reg.example/a", "images"), ("reg.example/team/a", "vm"), ("reg.test/a", "disk")):
        location = resolve(ImageName.parse(name), [], "https")
        assert isinstance(location, RegistryLocation)
        assert place_of_disk(paths, location) == place
