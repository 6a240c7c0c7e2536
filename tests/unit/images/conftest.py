"""A web server and a registry that do as each test tells them; small disks made by qemu-img. A thread of the tests'
process reads the images; `confined_store` starts the confined child for each, as the daemon does."""

from __future__ import annotations

import platform
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.parser import ParserThread
from fakes.registry import FakeRegistry, tar
from fakes.waiting import eventually
from fakes.webserver import LOOPBACK, WebServer, serving

from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.images.ports import FetchedImage
from virtshim.model.image import Credentials


@pytest.fixture
def web() -> Iterator[WebServer]:
    with serving() as server:
        yield server


@pytest.fixture
def make_tar() -> Callable[..., bytes]:
    return tar


@pytest.fixture
def fake_registry(web: WebServer) -> FakeRegistry:
    return FakeRegistry(web)


@pytest.fixture
def qemu_img() -> Callable[..., None]:
    def run(*argv: str) -> None:
        subprocess.run(["qemu-img", *argv], check=True, capture_output=True)

    return run


@pytest.fixture(scope="session")
def qcow2(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A sound, small disk of 16 MiB."""
    path = tmp_path_factory.mktemp("disk") / "sound.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", path, "16M"], check=True)
    return path.read_bytes()


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., ImageFileStore]:
    def make(**settings: Any) -> ImageFileStore:
        chosen = ImageSettings(**{"insecure_registries": LOOPBACK, **settings})
        store = ImageFileStore(str(tmp_path / "images"), chosen, parser=ParserThread)
        store.sweep()
        return store

    return make


@pytest.fixture
def store(make_store: Callable[..., ImageFileStore]) -> ImageFileStore:
    return make_store()


@pytest.fixture
def confined_store(tmp_path: Path) -> ImageFileStore:
    store = ImageFileStore(str(tmp_path / "images"), ImageSettings(insecure_registries=LOOPBACK))
    store.sweep()
    return store


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the tries of a download."""
    monkeypatch.setattr("virtshim.images.downloads.resumed.PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture
def partial(tmp_path: Path) -> Callable[[], list[Path]]:
    """What is there of downloads that broke off."""
    return lambda: [path for path in (tmp_path / "images" / "partial").rglob("*") if path.is_file()]


@pytest.fixture
def incoming(tmp_path: Path) -> Callable[[], list[str]]:
    """What is half-made in the store."""
    return lambda: [entry.name for entry in (tmp_path / "images" / "incoming").iterdir()]


@pytest.fixture(autouse=True)
def amd64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def pull(store: ImageFileStore, incoming: Callable[[], list[str]]) -> Callable[..., FetchedImage]:
    """Pulls, and checks that no half-made file is left, whatever happens."""

    def run(reference: str, credentials: Credentials | None = None) -> FetchedImage:
        try:
            return store.fetch(reference, credentials, threading.Event())
        finally:
            eventually(lambda: incoming() == [])

    return run
