"""A volume shows the layers of an OCI artifact as files with their titles."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from backports import zstd
from fakes.clock import FakeClock
from fakes.layers import entry, layer, same_gzip
from fakes.registry import FakeRegistry

from virtshim.images.service import ImageService
from virtshim.model.errors import InvalidRequest, ResourceExhausted
from virtshim.store.copies import ImageNoteFiles
from virtshim.store.records import SqliteRecords


@pytest.fixture
def artifact(fake_registry: FakeRegistry) -> Callable[..., str]:
    """Files as layers, by their titles; those called .tar are archives."""

    def push(when: str = "", **files: bytes) -> str:
        layers = []
        for title, data in files.items():
            kind = "application/vnd.oci.image.layer.v1.tar" if title.endswith(".tar") else "text/plain"
            named = {"annotations": {"org.opencontainers.image.title": title}} if title else {}
            layers.append({**fake_registry.blob("art", data), "mediaType": kind, **named})
        made = {"schemaVersion": 2, "config": fake_registry.blob("art", b"{}"), "layers": layers}
        fake_registry.document("art", "latest", {**made, "annotations": {"when": when}})
        return fake_registry.name("art")

    return push


def test_an_artifacts_files_are_what_a_volume_shows(artifact, pull, store) -> None:
    packed = gzip.compress(b"as it is")
    found = pull(
        artifact(**{"README.md": b"read me", "sub/model.gz": packed, "docs.tar": layer(entry("docs/a", b"1"))})
    )
    root = Path(store.path(found.tree, ""))
    assert (root / "README.md").read_text() == "read me"
    assert (root / "sub/model.gz").read_bytes() == packed
    assert (root / "docs/a").read_text() == "1"
    assert found.digest == found.tree


def test_an_artifacts_only_file_is_a_disk_or_a_file_by_its_content(artifact, pull, store, qcow2: bytes) -> None:
    disk = pull(artifact(anything=qcow2))
    assert (Path(store.path(disk.tree, "")) / "anything").samefile(store.path(disk.digest))
    text = pull(artifact(**{"chart.txt": b"text"}))
    assert text.digest == text.tree
    assert (Path(store.path(text.tree, "")) / "chart.txt").read_text() == "text"
    assert pull(artifact(**{"chart.txt": b"text"})) == text


def test_a_file_that_is_pushed_again_is_the_same_image(artifact, pull) -> None:
    first, again = (pull(artifact(when, **{"model.bin": b"weights"})) for when in ("monday", "tuesday"))
    assert (again.id, again.tree) == (first.id, first.tree)
    assert again.repo_digest != first.repo_digest
    assert pull(artifact(**{"other.bin": b"weights"})).tree != first.tree


def test_a_disk_pulled_again_from_another_source_keeps_its_files(
    fake_registry: FakeRegistry, store, web, qcow2: bytes, tmp_path: Path
) -> None:
    def pushed(name: str) -> str:
        title = {"annotations": {"org.opencontainers.image.title": "vm.qcow2"}}
        disk = {**fake_registry.blob(name, qcow2), "mediaType": "application/octet-stream", **title}
        config = fake_registry.blob(name, b"{}")
        made = {"schemaVersion": 2, "config": config, "layers": [disk], "annotations": {"when": f"{name} was pushed"}}
        fake_registry.document(name, "latest", made)
        return fake_registry.name(name)

    with contextlib.closing(SqliteRecords(str(tmp_path / "state.db"))) as records:
        images = ImageService(records, store, ImageNoteFiles(str(tmp_path / "notes")), FakeClock())
        first = images.pull(pushed("a"), None, threading.Event())
        assert first.tree is not None
        for again in (pushed("b"), web.serve("/vm.qcow2", qcow2), pushed("a")):
            found = images.pull(again, None, threading.Event())
            assert (found.id, found.tree) == (first.id, first.tree)
        assert store.stored() == {first.digest, first.tree}


def test_a_disk_by_another_title_is_the_same_image_with_the_same_files(
    artifact, store, web, qcow2: bytes, tmp_path: Path
) -> None:
    with contextlib.closing(SqliteRecords(str(tmp_path / "state.db"))) as records:
        images = ImageService(records, store, ImageNoteFiles(str(tmp_path / "notes")), FakeClock())
        first = images.pull(artifact(**{"vm.qcow2": qcow2}), None, threading.Event())
        for title in ("other.qcow2", "vm.qcow2", "other.qcow2"):
            found = images.pull(artifact(**{title: qcow2}), None, threading.Event())
            assert (found.id, found.tree) == (first.id, first.tree)
        assert store.stored() == {first.digest, first.tree}
        assert os.listdir(store.path(first.tree, "")) == ["vm.qcow2"]
    disk = f"/blobs/{first.digest}"
    assert sum(path.endswith(disk) for path, *_ in web.seen) == 2, "once for each manifest"


def test_layers_packed_differently_are_separate_trees_with_one_disk(
    push, store, web, qcow2: bytes, tmp_path: Path
) -> None:
    layers = layer(entry("disk/vm.qcow2", qcow2), entry("etc/motd", b"hello"))
    names = [push(layers, name=name, pack=pack) for name, pack in (("a", same_gzip), ("b", zstd.compress))]
    with contextlib.closing(SqliteRecords(str(tmp_path / "state.db"))) as records:
        images = ImageService(records, store, ImageNoteFiles(str(tmp_path / "notes")), FakeClock())
        found = [images.pull(name, None, threading.Event()) for name in names * 2]
        assert [(one.id, one.tree) for one in found[:2]] == [(one.id, one.tree) for one in found[2:]]
        assert found[0].digest == found[1].digest
        assert found[0].id != found[1].id
        assert store.stored() == {found[0].digest, found[0].tree, found[1].tree}


def test_files_in_boot_of_an_artifacts_archive_are_ordinary_files(artifact, pull, store) -> None:
    found = pull(artifact(**{"system.tar": layer(entry("boot/vmlinuz", b"kernel"), entry("etc/motd", b"hello"))}))
    assert (found.digest, found.boot) == (found.tree, ())
    assert (Path(store.path(found.tree, "")) / "boot/vmlinuz").read_text() == "kernel"


def test_a_layer_without_a_title_is_named_by_its_digest(artifact, pull, store) -> None:
    found = pull(artifact(**{"": b"text", "a": b"1"}))
    assert set(os.listdir(store.path(found.tree, ""))) == {"a", hashlib.sha256(b"text").hexdigest()}


def test_an_artifact_that_will_not_fit_is_refused_before_its_first_file(
    artifact, pull, web, free: Callable[[int], None]
) -> None:
    name = artifact(**{f"model-{n}": os.urandom(1000) for n in range(5)})
    free(4500)
    with pytest.raises(ResourceExhausted, match="does not fit"):
        pull(name)
    assert sum("/blobs/" in path for path, *_ in web.seen) == 1, "its config alone"


@pytest.mark.parametrize("title", ["../evil", "a/../../evil", ".."])
def test_a_title_with_a_path_upwards_is_refused(artifact, pull, store, title: str) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot be a volume: it holds the title .*, which contains '..'"):
        pull(artifact(**{title: b"1", "b": b"2"}))
    assert store.stored() == frozenset()
