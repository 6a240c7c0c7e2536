"""The daemon's confined child, and the thread that replaces it in tests, fulfil the contract of the parser of untrusted
images."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import lzma
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.journal import WAIT_LIMIT
from fakes.parser import ParserThread
from fakes.registry import FakeRegistry, tar
from fakes.webserver import LOOPBACK, WebServer, serving

from virtshim.images.confined import frames
from virtshim.images.confinement import Account, Bounds, ConfinedChild, Parser, account
from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.images.ports import FetchedImage
from virtshim.images.verify import verify
from virtshim.model.errors import DeadlineExceeded, InvalidRequest
from virtshim.model.image import DiskFormat
from virtshim.system.process import Piped

NEVER = threading.Event()
BOUNDS = Bounds(memory=512 << 20, cpu_seconds=60)
LARGEST = 64 << 20
DISK = bytes(510) + b"\x55\xaa" + bytes(512)
FILES = {"etc/": b"", "etc/motd": b"welcome\n", "boot/vmlinuz": b"kernel", "data": os.urandom(100_000)}

Kind = Callable[[Account], Parser]
KINDS = [pytest.param(ConfinedChild, id="child"), pytest.param(ParserThread, id="thread")]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


@pytest.fixture
def parser(kind: Kind) -> Parser:
    return kind(account())


@pytest.fixture
def web() -> Iterator[WebServer]:
    with serving() as server:
        yield server


@pytest.fixture
def store(kind: Kind, tmp_path: Path) -> ImageFileStore:
    return store_in(tmp_path / "images", kind)


def store_in(directory: Path, kind: Kind) -> ImageFileStore:
    settings = ImageSettings(insecure_registries=LOOPBACK, max_bytes=LARGEST)
    store = ImageFileStore(str(directory), settings, parser=kind)
    store.sweep()
    return store


def push(web: WebServer, packed: bytes, plain: bytes) -> str:
    """Pushes an image of one layer; returns its name."""
    registry = FakeRegistry(web)
    registry.manifest("a/b", [(packed, plain)])
    return registry.name("a/b")


def fetch(store: ImageFileStore, name: str, cancelled: threading.Event = NEVER) -> FetchedImage:
    return store.fetch(name, None, cancelled)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
@pytest.mark.parametrize("entries", [{"disk/a.img": DISK}, {"disk/a.img": DISK, **FILES}, FILES], ids=len)
def test_the_confined_child_and_the_thread_store_the_same(
    web: WebServer, tmp_path: Path, entries: dict[str, bytes], pack: Callable[[bytes], bytes]
) -> None:
    plain = tar(entries)
    name = push(web, pack(plain), plain)
    child, thread = (store_in(tmp_path / kind.__name__, kind) for kind in (ConfinedChild, ParserThread))
    found = fetch(child, name)
    assert fetch(thread, name) == found
    if "disk/a.img" in entries:
        assert Path(thread.path(found.digest)).read_bytes() == Path(child.path(found.digest)).read_bytes() == DISK
    if "etc/motd" in entries:
        assert found.tree is not None
        assert [Path(one.path(found.tree, "etc"), "motd").read_bytes() for one in (child, thread)] == [b"welcome\n"] * 2
        assert [len(found.boot), thread.stored()] == [1, child.stored()]


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (gzip.compress(tar({"disk/a.img": DISK}))[:-20], "gzip data is cut short"),
        (gzip.compress(b"no tar" * 100), "cannot be read"),
        (tar({"disk/a.img": DISK, "disk/b.img": DISK}), "disk"),
        (tar({"disk/a.img": b"KDMV" + DISK}), "VMDK"),
        (gzip.compress(bytes(LARGEST + 1)), "images.max_bytes"),
    ],
    ids=["broken gzip", "no tar", "two disks", "wrong disk", "too large"],
)
def test_a_refusal_has_its_reason_and_leaves_nothing(
    web: WebServer, store: ImageFileStore, tmp_path: Path, packed: bytes, why: str
) -> None:
    plain = gzip.decompress(packed) if packed.startswith(b"\x1f\x8b") and "short" not in why else packed
    with pytest.raises(InvalidRequest, match=why):
        fetch(store, push(web, packed, plain))
    assert (store.stored(), os.listdir(tmp_path / "images/incoming")) == (frozenset(), [])


def test_a_pull_can_be_cancelled_within_a_layer(web: WebServer, store: ImageFileStore, tmp_path: Path) -> None:
    plain = tar({"disk/a.img": os.urandom(4 << 20)})
    name, cancelled = push(web, plain, plain), threading.Event()

    def route(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(plain)))
        request.end_headers()
        request.wfile.write(plain[: 3 << 20])
        cancelled.set()
        web.over.wait(WAIT_LIMIT)

    web.routes[f"/v2/a/b/blobs/sha256:{hashlib.sha256(plain).hexdigest()}"] = route
    with pytest.raises(DeadlineExceeded):
        fetch(store, name, cancelled)
    assert (store.stored(), os.listdir(tmp_path / "images/incoming")) == (frozenset(), [])


@pytest.mark.parametrize("is_full", [False, True], ids=["not fed", "not heard"])
def test_an_abandoned_parser_leaves_nothing_open(parser: Parser, *, is_full: bool) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with parser.unpack(BOUNDS) as program:
        send(program, frames.BEGIN, frames.words("x", str(LARGEST), "disk"))
        send(program, frames.LAYER, frames.words("its layer", "a", "a", frames.WHOLE))
        send(program, frames.DATA, b"the first bytes of more")
        if is_full:
            with contextlib.suppress(BlockingIOError):
                while True:
                    send(program, frames.DATA, bytes(4096 - frames.HEAD_BYTES))
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_failed_parser_ends_with_its_reason(parser: Parser) -> None:
    with parser.unpack(BOUNDS) as program:
        send(program, frames.END)
        done = program.end(WAIT_LIMIT)
    assert done.returncode == 1
    assert done.summary().endswith("ValueError: frame b'E' where b'B' is expected")


def send(program: Piped, kind: bytes, payload: bytes = b"") -> None:
    os.write(program.feed, frames.head(kind, len(payload)) + payload)


def test_a_sound_disk_passes(parser: Parser, tmp_path: Path) -> None:
    raw, qcow2 = tmp_path / "raw", tmp_path / "qcow2"
    raw.write_bytes(DISK)
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", qcow2, "16M"], check=True)
    assert verify(str(raw), "x", LARGEST, parser) == (DiskFormat.RAW, len(DISK))
    assert verify(str(qcow2), "x", LARGEST, parser) == (DiskFormat.QCOW2, 16 << 20)


def test_a_disk_is_refused_by_its_header_or_by_qemu_img(parser: Parser, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", disk, "16M"], check=True)
    damaged = bytearray(disk.read_bytes())
    damaged[20:24] = b"\xff\xff\xff\xff"  # the bits of its clusters
    for data, why in ((b"KDMV" + DISK, "VMDK"), (damaged, r"cannot be read by qemu-img: .*luster")):
        disk.write_bytes(data)
        with pytest.raises(InvalidRequest, match=why) as caught:
            verify(str(disk), "x", LARGEST, parser)
        assert "/proc" not in str(caught.value)


def test_qemu_img_does_not_see_a_disk_that_its_header_refuses(parser: Parser, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(b"KDMV" + DISK)
    with disk.open("rb") as file:
        done = parser.judge(file.fileno(), BOUNDS, NEVER)
    assert (done.returncode, done.stdout.count(b"\n"), done.stderr) == (0, 1, b"")


@pytest.mark.parametrize("begin", [b"", b"KDMV"], ids=["sound", "refused"])
def test_a_check_can_be_cancelled(parser: Parser, tmp_path: Path, begin: bytes) -> None:
    disk, cancelled = tmp_path / "disk", threading.Event()
    disk.write_bytes(begin + DISK)
    cancelled.set()
    with pytest.raises(DeadlineExceeded, match="gave up"):
        verify(str(disk), "x", LARGEST, parser, cancelled)
