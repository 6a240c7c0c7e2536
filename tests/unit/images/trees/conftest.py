"""Images of layers that a test makes, and the writer of their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.layers import same_gzip
from fakes.registry import FakeRegistry

from virtshim.images.downloads.room import Room, Share
from virtshim.images.trees.writer import TreeWriter


@pytest.fixture
def push(fake_registry: FakeRegistry) -> Callable[..., str]:
    """An image of these layers, lowest first."""

    def push(*layers: bytes, name: str = "a", pack: Callable[[bytes], bytes] = same_gzip) -> str:
        fake_registry.manifest(name, [(pack(plain), plain) for plain in layers])
        return fake_registry.name(name)

    return push


@pytest.fixture
def unpacked(push, pull, store) -> Callable[..., Path]:
    """The root directory of what these layers make."""

    def unpacked(*layers: bytes) -> Path:
        found = pull(push(*layers))
        assert found.tree is not None
        return Path(store.path(found.tree, ""))

    return unpacked


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TreeWriter]:
    with TreeWriter(tmp_path / "tree", "evil", 1 << 20, Share(Room())) as made:
        yield made


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how many bytes are free."""

    def say(size: int) -> None:
        monkeypatch.setattr("virtshim.images.trees.writer.free_bytes", lambda _: size)
        monkeypatch.setattr("virtshim.images.disk_writer.free_bytes", lambda _: size)

    return say
