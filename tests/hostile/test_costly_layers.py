"""Layers of a few KiB cannot cost the daemon much time, memory or inodes."""

from __future__ import annotations

import contextlib
import gzip
import io
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.registry import FakeRegistry
from fakes.webserver import LOOPBACK, WebServer

from virtshim.images.confined import frames
from virtshim.images.confined.contents import ImageTree
from virtshim.images.confined.layer_tar import EntryKind, TarEntry
from virtshim.images.downloads.room import Room, Share
from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.images.trees.writer import TreeWriter
from virtshim.model.errors import InternalError, InvalidRequest, ResourceExhausted

pytestmark = pytest.mark.hostile

# Processor time of the daemon's thread, on a loaded machine.
SECONDS = 2.0
DEEP = "d/" * 250
LONG = ("x" * 14 + "/") * 250


def branches(count: int, path: str) -> Iterator[str]:
    """Paths with many parent directories that have no entry of their own."""
    return (f"{n}/{path}f" for n in range(count))


def by_turns(count: int, path: str) -> Iterator[str]:
    """Paths that alternate between the two ends of the tree."""
    return (f"{'ab'[n % 2]}/{path}{n}" for n in range(count))


COSTLY: dict[str, Callable[[], Iterator[str]]] = {
    "directories that nobody tells": lambda: branches(400, DEEP),
    "long directories that nobody tells": lambda: branches(400, LONG),
    "a tree from end to end": lambda: by_turns(5000, DEEP),
}


def layer(names: Iterator[str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


@pytest.mark.parametrize("case", COSTLY)
def test_a_small_layer_costs_the_daemon_little_time(web: WebServer, tmp_path: Path, case: str) -> None:
    store = ImageFileStore(str(tmp_path / "images"), ImageSettings(insecure_registries=LOOPBACK, max_bytes=64 << 20))
    plain = layer(COSTLY[case]())
    registry = FakeRegistry(web)
    registry.manifest("a", [(gzip.compress(plain), plain)])
    began = time.thread_time()
    with contextlib.suppress(InvalidRequest):
        store.fetch(registry.name("a"), None, threading.Event())
    assert time.thread_time() - began < SECONDS


def test_implied_parent_directories_count_as_entries() -> None:
    told: list[bytes] = []
    tree = ImageTree(lambda kind, _: told.append(kind), most_entries=1000)
    for name in branches(100, "d/" * 20):
        tree.take(TarEntry(name, EntryKind.FILE), iter(()))
    assert "more than" in tree.refused
    assert told.count(frames.ENTRY) <= 1000


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TreeWriter]:
    with TreeWriter(tmp_path / "tree", "image", 1 << 20, Share(Room())) as made:
        yield made


def said(kind: str, path: str, more: str = "", mtime: int = 0) -> bytes:
    return frames.names(kind, path, "493", "0", "0", str(mtime), more)


def test_a_taken_over_child_cannot_report_endless_names_of_the_disk(writer: TreeWriter) -> None:
    writer.tell(said("x", "root/disk"))
    for n in range(5000):
        writer.tell(said("h", f"root/{n}", "root/disk"))
    assert "names" in writer.refused


def test_names_of_the_disk_are_at_most_as_long_as_a_path(writer: TreeWriter) -> None:
    """Names are kept until the disk exists, and a frame may have a mebibyte."""

    def many(kind: str, name: str, more: str = "") -> None:
        for n in range(100):
            writer.tell(said(kind, f"root/{n}{name}", more))

    long = "x" * (1 << 19)
    tracemalloc.start()
    try:
        for told in (("x", long), ("h", "", f"root/{long}")):
            with pytest.raises(InternalError, match="invalid data"):
                many(*told)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_a_taken_over_child_costs_the_daemon_little_memory_and_time(writer: TreeWriter) -> None:
    began = time.thread_time()
    tracemalloc.start()
    try:
        for name in branches(100, LONG):
            parts = name.split("/")
            for depth in range(1, len(parts)):
                writer.tell(said("d", "root/" + "/".join(parts[:depth])))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert time.thread_time() - began < 5 * SECONDS  # most of it is due to tracemalloc


def test_a_pull_leaves_a_reserve_of_inodes(writer: TreeWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_files, f_favail = 1_000_000, 100

    monkeypatch.setattr("os.fstatvfs", lambda _: Full)

    def many() -> None:
        for n in range(5000):
            writer.tell(said("f", f"root/{n}", "0"))

    with pytest.raises(ResourceExhausted, match="does not fit"):
        many()


def test_directories_keep_their_mtime_if_files_are_created_in_them_later(writer: TreeWriter, tmp_path: Path) -> None:
    for one in (
        said("d", "root/a", mtime=100), said("d", "root/a/b", mtime=200), said("f", "root/a/b/c", "0"),
        said("d", "root/z", mtime=300), said("f", "root/a/late", "0"), said("h", "root/z/link", "root/a/b/c"),
        said("h", "root/a/link", "root/z/link"),
    ):  # fmt: skip
        writer.tell(one)
    writer.finish()
    root: Any = tmp_path / "tree/root"
    assert [int((root / name).stat().st_mtime) for name in ("a", "a/b", "z")] == [100, 200, 300]
