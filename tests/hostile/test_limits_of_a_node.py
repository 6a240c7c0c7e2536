"""A source, a pod's author or a local user cannot take more than a node allows: time of a pull, size of a disk, an
image's bytes."""

from __future__ import annotations

import contextlib
import http.server
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.webserver import LOOPBACK, WebServer, serving
from fakes.world import World, sandbox_config

from virtshim.config.settings import Vm
from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.model.errors import DeadlineExceeded, InvalidRequest, Unavailable

pytestmark = pytest.mark.hostile

NEVER = threading.Event()
STRANGER = 65534
READERS = 64_055


@pytest.fixture
def web() -> Iterator[WebServer]:
    with serving() as web:
        yield web


def trickled(web: WebServer, piece: bytes) -> str:
    """Serves an image of an announced GiB by sending the piece again and again; returns its name."""

    def trickle(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(1 << 30))
        request.end_headers()
        with contextlib.suppress(OSError):
            while not web.over.wait(0.02):
                request.wfile.write(piece)
        request.close_connection = True

    web.routes["/disk.qcow2"] = trickle
    return web.url("/disk.qcow2")


def test_a_source_that_sends_single_bytes_is_given_up(web: WebServer, tmp_path: Path) -> None:
    settings = ImageSettings(
        insecure_registries=LOOPBACK, download_protocol="http", progress_timeout=1.0, min_rate=1000
    )
    store = ImageFileStore(str(tmp_path / "images"), settings)
    with pytest.raises(Unavailable, match=r"slower than 1000 bytes a second \(images\.min_rate\) for 1 s"):
        store.fetch(trickled(web, b"x"), None, NEVER)
    assert list((tmp_path / "images" / "incoming").iterdir()) == []


def test_a_slow_steady_source_is_read_until_the_pulls_time_is_over(web: WebServer, tmp_path: Path) -> None:
    settings = ImageSettings(
        insecure_registries=LOOPBACK, download_protocol="http", progress_timeout=1.0, min_rate=100, pull_timeout=2.5
    )
    store = ImageFileStore(str(tmp_path / "images"), settings)
    with pytest.raises(DeadlineExceeded, match=r"images\.pull_timeout"):
        store.fetch(trickled(web, bytes(1000)), None, NEVER)
    assert list((tmp_path / "images" / "incoming").iterdir()) == []


def test_a_root_volume_that_is_too_large_for_the_node_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, vm=Vm(max_root_volume=10 << 30))  # type: ignore[arg-type]
    try:
        world.pull()
        greedy = world.run(config=sandbox_config(annotations={"VirtletRootVolumeSize": "11Gi"}))
        with pytest.raises(InvalidRequest, match=r"VirtletRootVolumeSize.*vm\.max_root_volume"):
            world.create(greedy)
        assert world.outside.disks.existing() == frozenset()
        fitting = world.run("other", config=sandbox_config(annotations={"VirtletRootVolumeSize": "10Gi"}))
        world.create(fitting)
    finally:
        world.close()


@pytest.fixture
def open_to_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Opens pytest's own directories, so that the store's permissions alone decide."""
    directory = tmp_path_factory.mktemp("store")
    for path in (directory, *list(directory.parents)[:2]):
        path.chmod(0o755)
    return directory


def reads(path: str, uid: int, gid: int) -> bool:
    command = ("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "cat", path)
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_only_qemus_group_can_read_an_image_even_if_its_digest_is_known(
    web: WebServer, open_to_all: Path, sound_disk: Callable[[], bytes]
) -> None:
    where = str(open_to_all / "images")
    earlier = ImageFileStore(where, ImageSettings(insecure_registries=LOOPBACK, download_protocol="http"))
    one = earlier.fetch(web.serve("/one.qcow2", sound_disk()), None, NEVER).digest
    store = ImageFileStore(
        where, ImageSettings(insecure_registries=LOOPBACK, download_protocol="http"), lambda: READERS
    )
    store.sweep()
    other = store.fetch(web.serve("/other.qcow2", sound_disk()), None, NEVER).digest
    for digest in (one, other):
        path = store.path(digest)
        assert reads(path, STRANGER, READERS)
        assert not reads(path, STRANGER, STRANGER)
        assert os.stat(path).st_mode & 0o777 == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_only_root_can_read_an_image_that_virtshim_opens_for_qemu(
    web: WebServer, open_to_all: Path, sound_disk: Callable[[], bytes]
) -> None:
    where = str(open_to_all / "images")
    earlier = ImageFileStore(
        where, ImageSettings(insecure_registries=LOOPBACK, download_protocol="http"), lambda: READERS
    )
    one = earlier.fetch(web.serve("/one.qcow2", sound_disk()), None, NEVER).digest
    assert reads(earlier.path(one), STRANGER, READERS)
    store = ImageFileStore(where, ImageSettings(insecure_registries=LOOPBACK, download_protocol="http"), os.getegid)
    store.sweep()
    other = store.fetch(web.serve("/other.qcow2", sound_disk()), None, NEVER).digest
    for digest in (one, other):
        assert not reads(store.path(digest), STRANGER, READERS)


@pytest.fixture
def sound_disk(tmp_path: Path) -> Callable[[], bytes]:
    """A different sound disk at each call."""
    sizes = iter(range(16, 32))

    def make() -> bytes:
        path = tmp_path / "disk.qcow2"
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", path, f"{next(sizes)}M"], check=True)
        return path.read_bytes()

    return make
