from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.cri import Client, served
from fakes.cri import refused as refused_as
from fakes.registry import FakeRegistry
from fakes.webserver import LOOPBACK, WebServer, serving
from fakes.world import Outside

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.images.filestore import ImageFileStore, ImageSettings

LARGEST_DISK = 64 << 20


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A short path, because a socket's address holds 107 bytes."""
    directory = tempfile.mkdtemp(prefix="hg-")
    yield Path(directory)
    shutil.rmtree(directory)


@pytest.fixture
def web() -> Iterator[WebServer]:
    with serving() as server:
        yield server


class PullingNode:
    """A node whose image service is the real one, with a sound image on it."""

    def __init__(self, client: Client, images: Path) -> None:
        self.client = client
        self.images = images

    def pull(self, name: str) -> str:
        return self.client.pull(name)

    def state(self) -> object:
        """Everything that a pull may change, except the kept parts of a download that broke off."""
        files = {
            str(path): (path.stat().st_size, path.stat().st_mode, path.stat().st_mtime_ns)
            for path in self.images.rglob("*")
            if not path.is_dir() and "partial" not in path.parts
        }
        return files, str(self.client.ListImages(pb.ListImagesRequest()))

    def kept(self) -> set[Path]:
        """The kept parts of downloads that broke off."""
        return {path for path in (self.images / "partial").rglob("*") if not path.is_dir()}


@pytest.fixture(scope="module")
def pulling_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PullingNode]:
    directory = tmp_path_factory.mktemp("node")
    store = ImageFileStore(
        str(directory / "images"), ImageSettings(insecure_registries=LOOPBACK, max_bytes=LARGEST_DISK)
    )
    outside: Any = Outside()
    outside.files = store
    with served(directory, outside) as (_, client, _), serving() as web:
        node = PullingNode(client, directory / "images")
        node.pull(FakeRegistry(web).push("sound", {"disk/a.img": b"\xeb\x3c" + os.urandom(1022)}))
        yield node


@pytest.fixture
def refused(pulling_node: PullingNode, tmp_path: Path) -> Callable[..., None]:
    """Pulls as kubelet does; the pull must fail with that code and message, and leave everything unchanged."""

    def pull(name: str, words: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        before, kept = pulling_node.state(), pulling_node.kept()
        with refused_as(code, words) as said:
            pulling_node.pull(name)
        assert pulling_node.state() == before
        # Fewer may be kept: a pull continues the part of an earlier test whose registry had the same port.
        assert code is grpc.StatusCode.UNKNOWN or pulling_node.kept() <= kept
        assert not any(str(path) in "".join(said) for path in (tmp_path, pulling_node.images))

    return pull
