"""The fake and the real store with a web server fulfil the contract of ImageFiles."""

from __future__ import annotations

import base64
import hashlib
import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.background import Background
from fakes.images import FakeImageFiles
from fakes.journal import WAIT_LIMIT
from fakes.waiting import eventually
from fakes.webserver import LOOPBACK, WebServer, serving

from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.images.ports import FetchedImage, SentDisk
from virtshim.model.errors import DeadlineExceeded, InternalError, InvalidRequest, NotFound, PermissionRefused
from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.image import Credentials
from virtshim.store.ports import KnownImageFiles

NEVER = threading.Event()
ABSENT = ImageDigest(f"sha256:{'0' * 64}")
USER, PASSWORD = "puller", "secret"


class World:
    files: KnownImageFiles
    address: str

    def name(self, image: str) -> str:
        return f"{self.address}/{image}.qcow2"

    def publish(self, image: str, content: bytes, password: str = "") -> str:
        """Publishes an image; returns the name to pull."""
        raise NotImplementedError

    def stall(self, image: str) -> str:
        """Publishes an image whose download begins and never ends; returns its name."""
        raise NotImplementedError

    def asked(self) -> int:
        """How often the source was asked for an image."""
        raise NotImplementedError

    def leave_half_made(self) -> None:
        """Leaves the file of a process that was killed during a download."""
        raise NotImplementedError

    def half_made(self) -> int:
        raise NotImplementedError

    def fetch(self, name: str, password: str = "", cancelled: threading.Event = NEVER) -> FetchedImage:
        return self.files.fetch(name, Credentials(USER, password) if password else None, cancelled)


class InMemory(World):
    address = "registry.test"

    def __init__(self) -> None:
        self.files = self._fake = FakeImageFiles()

    def publish(self, image: str, content: bytes, password: str = "") -> str:
        self._fake.publish(self.name(image), content, password)
        return self.name(image)

    def stall(self, image: str) -> str:
        self._fake.stalled = True
        return self.publish(image, b"endless")

    def asked(self) -> int:
        return len(self._fake.fetched)

    def leave_half_made(self) -> None:
        self._fake.half_fetch("image", None, NEVER)

    def half_made(self) -> int:
        return len(self._fake.unfinished)


@pytest.fixture
def in_memory() -> World:
    return InMemory()


class OnDisk(World):
    def __init__(self, directory: Path, web: WebServer) -> None:
        self.address = web.address
        self._web = web
        self._incoming = directory / "incoming"
        self.files = ImageFileStore(
            str(directory), ImageSettings(insecure_registries=LOOPBACK, download_protocol="http")
        )
        self.files.sweep()

    def publish(self, image: str, content: bytes, password: str = "") -> str:
        login = base64.b64encode(f"{USER}:{password}".encode()).decode()

        def route(request: http.server.BaseHTTPRequestHandler) -> None:
            allowed = not password or request.headers.get("Authorization") == f"Basic {login}"
            body = content if allowed else b""
            request.send_response(200 if allowed else 401)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)

        self._web.routes[f"/{image}.qcow2"] = route
        return self.name(image)

    def stall(self, image: str) -> str:
        def route(request: http.server.BaseHTTPRequestHandler) -> None:
            self._web.over.wait(WAIT_LIMIT)

        self._web.routes[f"/{image}.qcow2"] = route
        return self.name(image)

    def asked(self) -> int:
        return len(self._web.seen)

    def leave_half_made(self) -> None:
        (self._incoming / "half").touch()

    def half_made(self) -> int:
        return len(os.listdir(self._incoming))


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[World]:
    with serving() as web:
        yield OnDisk(tmp_path / "images", web)


@pytest.fixture(params=["in_memory", "on_disk"])
def world(request: pytest.FixtureRequest) -> World:
    made: World = request.getfixturevalue(request.param)
    return made


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Two different disks."""
    made = []
    for size in ("16M", "17M"):
        path = tmp_path_factory.mktemp("disk") / "sound.qcow2"
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", path, size], check=True)
        made.append(path.read_bytes())
    return made


def digest_of(content: bytes) -> ImageDigest:
    return ImageDigest(f"sha256:{hashlib.sha256(content).hexdigest()}")


def test_a_pull_stores_the_content_under_its_digest(world: World, disks: list[bytes]) -> None:
    name = world.publish("web", disks[0])
    found = world.fetch(name)
    assert found.digest == digest_of(disks[0])
    assert found.tag == f"{name}:latest"
    assert found.repo_digest == f"{name}@{found.digest}"
    assert found.size == len(disks[0])
    assert found.virtual_size > 0
    assert world.files.stored() == {found.digest}


def test_a_pull_by_digest_has_no_tag(world: World, disks: list[bytes]) -> None:
    name = f"{world.publish('web', disks[0])}@{digest_of(disks[0])}"
    found = world.fetch(name)
    assert (found.tag, found.repo_digest) == ("", name)


def test_stored_content_is_requested_again_but_stored_once(world: World, disks: list[bytes]) -> None:
    first = world.fetch(world.publish("web", disks[0]))
    asked = world.asked()
    assert world.fetch(world.name("web")) == first
    assert world.asked() > asked
    second = world.fetch(world.publish("same", disks[0]))
    assert second.digest == first.digest
    assert second.tag == f"{world.name('same')}:latest"
    assert world.files.stored() == {first.digest}


def test_a_name_pulls_the_current_content_of_its_source(world: World, disks: list[bytes]) -> None:
    first = world.fetch(world.publish("web", disks[0]))
    second = world.fetch(world.publish("web", disks[1]))
    assert first.digest != second.digest
    assert world.files.stored() == {first.digest, second.digest}


def test_an_image_missing_at_its_source_is_not_found(world: World) -> None:
    with pytest.raises(NotFound):
        world.fetch(world.name("none"))
    assert (world.files.stored(), world.half_made()) == (frozenset(), 0)


def test_each_pull_checks_the_password(world: World, disks: list[bytes]) -> None:
    name = world.publish("secret", disks[0], PASSWORD)
    for password in ("", "wrong"):
        with pytest.raises(PermissionRefused):
            world.fetch(name, password)
    assert world.files.stored() == frozenset()
    found = world.fetch(name, PASSWORD)
    with pytest.raises(PermissionRefused):
        world.fetch(name)
    assert world.files.stored() == {found.digest}


@pytest.mark.parametrize("name", ["", "two words", "registry.test/web@sha256:short", f"sha256:{'a' * 64}"])
def test_a_malformed_name_is_refused(world: World, name: str) -> None:
    with pytest.raises(InvalidRequest):
        world.fetch(name)
    assert world.asked() == 0


def test_a_pull_cancelled_before_it_begins_asks_no_source(world: World, disks: list[bytes]) -> None:
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(DeadlineExceeded):
        world.fetch(world.publish("web", disks[0]), cancelled=given_up)
    assert (world.asked(), world.files.stored()) == (0, frozenset())


def test_a_cancelled_pull_ends_and_leaves_nothing(world: World) -> None:
    given_up = threading.Event()
    name = world.stall("slow")
    pull = Background(lambda: world.fetch(name, cancelled=given_up))
    eventually(lambda: world.asked() > 0)
    given_up.set()
    with pytest.raises(DeadlineExceeded):
        pull.done()
    assert (world.files.stored(), world.half_made()) == (frozenset(), 0)


def test_a_deleted_file_is_gone_and_may_be_deleted_again(world: World, disks: list[bytes]) -> None:
    found, other = (world.fetch(world.publish(name, disk)) for name, disk in zip("ab", disks, strict=True))
    for _ in range(2):
        world.files.delete(found.digest)
        assert world.files.stored() == {other.digest}


def test_a_deleted_file_can_be_pulled_again(world: World, disks: list[bytes]) -> None:
    found = world.fetch(world.publish("web", disks[0]))
    world.files.delete(found.digest)
    assert world.fetch(world.name("web")) == found
    assert world.files.stored() == {found.digest}


def sent(*chunks: bytes, total: int = 0) -> SentDisk:
    return SentDisk(total, iter(chunks))


def test_a_disk_that_is_sent_is_stored_like_a_pulled_one(world: World, disks: list[bytes]) -> None:
    disk = disks[0]
    name = f"{world.publish('web', disk)}:v1"
    found = world.files.load(name, sent(disk[:100], disk[100:], total=len(disk)), NEVER)
    assert (found.digest, found.tag, found.repo_digest) == (digest_of(disk), name, f"{name[:-3]}@{digest_of(disk)}")
    assert (found.id.value, found.size) == (found.digest.value, len(disk))
    assert world.files.stored() == {found.digest}
    assert world.asked() == 0
    assert world.files.load("vm@" + digest_of(disk).value, sent(disk), NEVER).digest == found.digest


def broken_off() -> Iterator[bytes]:
    yield b"first"
    raise DeadlineExceeded("the client has gone")


@pytest.mark.parametrize(
    ("name", "total"),
    [("", 0), ("two words", 0), ("vm", 5), ("vm", 3), (f"vm@sha256:{'0' * 64}", 0)],
    ids=["no name", "a bad name", "shorter than announced", "longer than announced", "another digest"],
)
def test_a_disk_that_is_sent_wrongly_is_not_stored(world: World, name: str, total: int) -> None:
    with pytest.raises(InvalidRequest):
        world.files.load(name, sent(b"disk", total=total), NEVER)
    assert (world.files.stored(), world.half_made()) == (frozenset(), 0)


def test_a_disk_whose_sender_breaks_off_is_not_stored(world: World) -> None:
    with pytest.raises(DeadlineExceeded, match="has gone"):
        world.files.load("vm", SentDisk(0, broken_off()), NEVER)
    assert (world.files.stored(), world.half_made()) == (frozenset(), 0)


def test_a_disk_whose_sender_cancels_is_not_stored(world: World, disks: list[bytes]) -> None:
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(DeadlineExceeded):
        world.files.load("vm", sent(disks[0]), given_up)
    assert (world.files.stored(), world.half_made()) == (frozenset(), 0)


def test_a_sweep_removes_half_made_files_only(world: World, disks: list[bytes]) -> None:
    found = world.fetch(world.publish("web", disks[0]))
    world.leave_half_made()
    assert world.half_made() == 1
    world.files.sweep()
    assert world.half_made() == 0
    assert world.files.stored() == {found.digest}


def test_a_stored_file_has_its_facts_but_not_its_names(world: World, disks: list[bytes]) -> None:
    found = world.fetch(world.publish("web", disks[0]))
    assert world.files.describe(found.digest) == FetchedImage(
        ImageId(found.digest.value), found.digest, "", "", found.size, found.virtual_size, found.format
    )
    assert world.files.format_of(found.digest) == found.format
    with pytest.raises(InternalError):
        world.files.describe(ABSENT)
    with pytest.raises(NotFound):
        world.files.format_of(ABSENT)


def test_a_path_is_known_before_its_file_exists(world: World, disks: list[bytes]) -> None:
    before = world.files.path(digest_of(disks[0]))
    assert os.path.isabs(before)
    assert before == world.files.path(world.fetch(world.publish("web", disks[0])).digest)
    assert before != world.files.path(ABSENT)


def test_stored_bytes_are_counted(world: World, disks: list[bytes]) -> None:
    before = world.files.filesystem_usage()
    world.fetch(world.publish("web", disks[0]))
    after = world.files.filesystem_usage()
    assert after.used_bytes > before.used_bytes
    assert after.inodes_used > before.inodes_used
    assert os.path.isabs(after.mountpoint)


def test_the_size_of_one_image_is_returned(world: World, disks: list[bytes]) -> None:
    found, other = (world.fetch(world.publish(name, disk)) for name, disk in zip("ab", disks, strict=True))
    taken = world.files.filesystem_usage(found.digest).used_bytes
    assert (
        0
        < taken
        < world.files.filesystem_usage(found.digest, other.digest).used_bytes
        <= world.files.filesystem_usage().used_bytes
    )
    assert world.files.filesystem_usage(ABSENT).used_bytes == 0
    assert world.files.filesystem_usage(found.digest, ABSENT).used_bytes == taken


def test_the_space_of_the_file_system_is_returned(world: World) -> None:
    found = world.files.filesystem_usage().space
    assert 0 < found.available <= found.capacity
    assert 0 <= found.used_percent < 100
