"""An OCI artifact's files: its layers as they are, each under its title."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from virtshim.images.confined import frames
from virtshim.images.confined.frames import ROOT
from virtshim.images.oci_manifest import Descriptor
from virtshim.images.trees.writer import TreeWriter

_MODE = 0o644
_DIRECTORY_MODE = 0o755


def add(tree: TreeWriter, layer: Descriptor, chunks: Generator[bytes, None, None]) -> None:
    """Raises what `chunks` and the writer raise."""
    path = _prepare(tree, layer)
    if path:
        tree.tell(_entry("f", path, _MODE, str(layer.size)))
    with contextlib.closing(chunks):
        for chunk in chunks:
            tree.write(chunk)


def add_disk(tree: TreeWriter, layer: Descriptor) -> None:
    """The disk is linked there when it is stored."""
    if path := _prepare(tree, layer):
        tree.add_disk(path)


def _prepare(tree: TreeWriter, layer: Descriptor) -> str:
    """Its path, whose directories are there; "" when it is refused. Without a title it is named by its digest, as CRI-O does."""
    title = layer.title.encode(errors="replace").decode()
    parts = [part for part in title.split("/") if part not in ("", ".")] or [layer.digest.partition(":")[2]]
    if ".." in parts or "\0" in title:
        tree.refuse(f"it holds the title {title!a}, which leads up")
        return ""
    for depth in range(1, len(parts)):
        tree.tell(_entry("d", "/".join((ROOT, *parts[:depth])), _DIRECTORY_MODE))
    return "/".join((ROOT, *parts))


def _entry(kind: str, path: str, mode: int, more: str = "") -> bytes:
    return frames.names(kind, path, str(mode), "0", "0", "0", more)
