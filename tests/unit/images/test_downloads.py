"""One download at a time of each content, and what breaks off goes on where it was."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.background import Background
from fakes.journal import WAIT_LIMIT
from fakes.registry import FakeRegistry
from fakes.waiting import eventually
from fakes.webserver import WebServer, serving

from virtshim.domain.errors import DeadlineExceeded, InvalidRequest, ResourceExhausted, Unavailable
from virtshim.images import disk_writer
from virtshim.images.disk_writer import DiskWriter
from virtshim.images.downloads import partials
from virtshim.images.filestore import ImageFileStore

NEVER = threading.Event()
FILE = "/disk.qcow2"
MANIFEST = "/v2/a/manifests/latest"
AT = 70_000


class Source:
    """One image, and the path at its server whose bytes take long."""

    def __init__(self, web: WebServer, name: str, path: str, body: bytes) -> None:
        self.web, self.name, self.path, self.body = web, name, path, body

    def cut(self, *after: int, etag: str = '"1"') -> None:
        self.web.serve_parts(self.path, self.body, after, etag)

    def asked(self) -> list[str]:
        return self.web.ranges(self.path)


@pytest.fixture
def file(web: WebServer, qcow2: bytes) -> Source:
    return Source(web, web.serve_parts(FILE, qcow2), FILE, qcow2)


@pytest.fixture
def layer(fake_registry: FakeRegistry, make_tar: Callable[..., bytes], qcow2: bytes) -> Source:
    """Does not shrink when it is packed."""
    plain = make_tar({"disk/x": qcow2, "etc/noise": os.urandom(150_000)})
    packed = gzip.compress(plain)
    fake_registry.manifest("a", [(packed, plain)])
    path = f"/v2/a/blobs/sha256:{hashlib.sha256(packed).hexdigest()}"
    source = Source(fake_registry.web, fake_registry.name("a"), path, packed)
    source.cut()
    return source


@pytest.fixture(params=["file", "layer"])
def source(request: pytest.FixtureRequest) -> Source:
    made: Source = request.getfixturevalue(request.param)
    return made


def fetch(store: ImageFileStore, source: Source, cancelled: threading.Event = NEVER) -> Any:
    return store.fetch(source.name, None, cancelled)


def is_whole(store: ImageFileStore, found: Any, qcow2: bytes) -> bool:
    return (
        found.digest.hex == hashlib.sha256(qcow2).hexdigest() and Path(store.path(found.digest)).read_bytes() == qcow2
    )


def test_what_breaks_off_goes_on_in_the_same_pull(source: Source, store, qcow2: bytes, partial, incoming) -> None:
    source.cut(AT, 10_000, 500)
    assert is_whole(store, fetch(store, source), qcow2)
    assert source.asked() == ["", *(f"bytes={at}-" for at in (AT, AT + 10_000, AT + 10_500))]
    assert (partial(), incoming()) == ([], [])


def test_what_broke_off_goes_on_after_a_restart(
    source: Source, make_store: Callable[..., ImageFileStore], qcow2: bytes, partial, incoming
) -> None:
    source.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable, match="broke off"):
        fetch(make_store(), source)
    assert [path.stat().st_size for path in partial()] == [AT]
    assert incoming() == []
    asked = len(source.asked())
    store = make_store()
    assert is_whole(store, fetch(store, source), qcow2)
    assert source.asked()[asked:][-1] == f"bytes={AT}-"
    assert (partial(), incoming()) == ([], [])


def test_what_a_killed_process_left_is_gone_on_with(
    source: Source, make_store: Callable[..., ImageFileStore], qcow2: bytes, partial, tmp_path: Path
) -> None:
    """Bytes that were written are all there is: no note was made of them."""
    source.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(make_store(), source)
    (left,) = partial()
    os.truncate(left, AT - 1)
    store = make_store()
    assert is_whole(store, fetch(store, source), qcow2)
    assert source.asked()[-1] == f"bytes={AT - 1}-"


def test_a_server_that_knows_no_ranges_sends_it_all_again(web, file: Source, store, qcow2: bytes) -> None:
    file.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, file)
    web.serve(FILE, qcow2, ETag='"1"')
    assert is_whole(store, fetch(store, file), qcow2)


def test_a_registry_that_knows_no_ranges_sends_it_all_again(web, layer: Source, store, qcow2: bytes) -> None:
    layer.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, layer)
    web.serve(layer.path, layer.body)
    assert is_whole(store, fetch(store, layer), qcow2)


def test_a_file_that_has_changed_begins_anew(file: Source, store, qcow2: bytes, partial) -> None:
    file.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, file)
    file.body = qcow2 + bytes(512)
    file.cut(etag='"2"')
    assert is_whole(store, fetch(store, file), file.body)
    assert len(partial()) == 1


def test_a_file_that_changes_while_it_is_downloaded_is_not_patched_up(web, file: Source, store, qcow2: bytes) -> None:
    file.cut(AT)
    first = web.routes[FILE]
    newer = qcow2 + bytes(512)

    def route(request: Any) -> None:
        first(request)
        web.serve_parts(FILE, newer, etag='"2"')

    web.routes[FILE] = route
    with pytest.raises(Unavailable, match="has changed while it was downloaded"):
        fetch(store, file)
    assert is_whole(store, fetch(store, file), newer)


def test_a_part_other_than_the_one_asked_for_is_not_taken(web, file: Source, store, qcow2: bytes) -> None:
    file.cut(AT)
    first = web.routes[FILE]

    def route(request: Any) -> None:
        if "Range" in request.headers:
            del request.headers["Range"]
            request.headers["Range"] = "bytes=0-"
        first(request)

    web.routes[FILE] = route
    assert is_whole(store, fetch(store, file), qcow2)


def test_a_disk_that_breaks_off_without_a_strong_etag_is_not_kept(file: Source, store, partial) -> None:
    file.cut(AT, 0, 0, 0, etag='W/"1"')
    with pytest.raises(Unavailable, match="broke off"):
        fetch(store, file)
    assert file.asked() == [""]
    assert partial() == []


def test_a_part_that_was_damaged_on_disk_ends_no_more_than_one_pull(
    layer: Source, store, qcow2: bytes, partial
) -> None:
    layer.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, layer)
    (left,) = partial()
    left.write_bytes(os.urandom(AT))
    with pytest.raises(InvalidRequest):
        fetch(store, layer)
    assert partial() == []
    assert is_whole(store, fetch(store, layer), qcow2)


def test_the_digest_in_the_name_is_that_of_the_kept_bytes_too(file: Source, store, qcow2: bytes, partial) -> None:
    file.name += f"@sha256:{hashlib.sha256(qcow2).hexdigest()}"
    file.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, file)
    (left,) = partial()
    left.write_bytes(os.urandom(AT))
    with pytest.raises(InvalidRequest, match="has changed or was tampered with"):
        fetch(store, file)
    assert partial() == []
    assert is_whole(store, fetch(store, file), qcow2)


def test_what_is_refused_is_not_kept(web, store, partial) -> None:
    with pytest.raises(InvalidRequest):
        store.fetch(web.serve("/text.qcow2", b"no disk" * 100, ETag='"1"'), None, NEVER)
    assert partial() == []


def test_what_another_boot_left_is_not_used(file: Source, make_store, qcow2: bytes, partial) -> None:
    """A machine that was switched off may have lost any of it."""
    file.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(make_store(), file)
    (left,) = partial()
    shutil.move(left.parent, left.parent.with_name("another-boot"))
    store = make_store()
    assert partial() == []
    asked = len(file.asked())
    assert is_whole(store, fetch(store, file), qcow2)
    assert file.asked()[asked:] == [""]


def test_what_nobody_goes_on_with_is_forgotten_after_an_hour(web, file: Source, store, qcow2: bytes, partial) -> None:
    file.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, file)
    (left,) = partial()
    before = time.time() - partials._KEPT_SECONDS
    os.utime(left, (before + 60, before + 60))
    store.fetch(web.serve("/another.qcow2", qcow2), None, NEVER)
    assert partial() == [left]
    os.utime(left, (before - 60, before - 60))
    store.fetch(web.serve("/another.qcow2", qcow2), None, NEVER)
    assert partial() == []


def test_when_there_is_no_room_what_broke_off_makes_some(
    web, file: Source, store, qcow2: bytes, partial, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, file)
    assert len(partial()) == 1
    monkeypatch.setattr(disk_writer, "free_bytes", lambda _: 1000)
    with pytest.raises(ResourceExhausted):
        store.fetch(web.serve("/another.qcow2", qcow2), None, NEVER)
    assert partial() == []


def test_no_layer_is_kept_in_the_disks_way(layer: Source, store, partial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partials, "free_bytes", lambda _: 3 * len(layer.body))
    layer.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, layer)
    assert partial() == []


def test_a_layer_that_cannot_be_kept_is_pulled_all_the_same(
    layer: Source, store, qcow2: bytes, partial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partials, "_write", lambda descriptor, chunk: False)
    assert is_whole(store, fetch(store, layer), qcow2)
    assert partial() == []


def hold(source: Source, pulls: int) -> None:
    """Nobody gets the bytes before so many pulls have asked for the image."""
    first = MANIFEST if source.path != FILE else FILE

    def route(request: Any) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(source.body)))
        request.send_header("ETag", '"1"')
        request.end_headers()
        eventually(lambda: source.web.paths().count(first) >= pulls)
        request.wfile.write(source.body)

    source.web.routes[source.path] = route


def test_five_pulls_at_once_are_one_download(
    source: Source, store, qcow2: bytes, partial, incoming, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(source, 5)
    written: list[DiskWriter] = []
    finish = DiskWriter.finish
    monkeypatch.setattr(DiskWriter, "finish", lambda disk: (written.append(disk), finish(disk)))
    pulls = [Background(lambda: fetch(store, source)) for _ in range(5)]
    found = {pull.done() for pull in pulls}
    assert len(found) == len(written) == 1
    assert is_whole(store, found.pop(), qcow2)
    assert source.asked() == [""] * (5 if source.path == FILE else 1)
    assert (partial(), incoming()) == ([], [])


def test_who_waits_goes_on_when_the_one_that_downloads_is_given_up(
    source: Source, make_store, qcow2: bytes, partial
) -> None:
    store = make_store()
    arrived, given_up = threading.Event(), threading.Event()
    whole = source.web.routes[source.path]

    def slow(request: Any) -> None:
        if arrived.is_set():
            whole(request)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(source.body)))
        request.send_header("ETag", '"1"')
        request.end_headers()
        request.wfile.write(source.body[:AT])
        arrived.set()
        source.web.over.wait(60)

    source.web.routes[source.path] = slow
    first = Background(lambda: fetch(store, source, given_up))
    eventually(lambda: [path.stat().st_size for path in partial()] == [AT])
    asked = len(source.web.seen)
    second = Background(lambda: fetch(store, source))
    eventually(lambda: len(source.web.seen) > asked)
    given_up.set()
    with pytest.raises(DeadlineExceeded):
        first.done()
    assert is_whole(store, second.done(), qcow2)
    assert source.asked()[-1] == f"bytes={AT}-"


def test_nobody_waits_for_another_registry_that_sends_the_same_image_slowly(
    fake_registry: FakeRegistry, store, qcow2: bytes, web: WebServer
) -> None:
    """Whoever may name an image could hold up everybody's pulls of it."""
    with serving() as other:
        name, slow = fake_registry.push("a", {"disk/x": qcow2}), FakeRegistry(other).name("a")
        other.routes.update(web.routes)
        path = next(path for path in reversed(other.routes) if "/blobs/" in path)
        whole = other.routes[path]
        goes_on = threading.Event()

        def late(request: Any) -> None:
            assert goes_on.wait(WAIT_LIMIT)
            whole(request)

        other.routes[path] = late
        held = Background(lambda: store.fetch(slow, None, NEVER))
        eventually(lambda: path in other.paths())
        found = store.fetch(name, None, NEVER)
        assert is_whole(store, found, qcow2)
        goes_on.set()
        assert held.done().digest == found.digest  # type: ignore[attr-defined]


def test_who_waits_can_be_given_up(layer: Source, store, qcow2: bytes) -> None:
    hold(layer, 3)
    first, given_up = Background(lambda: fetch(store, layer)), threading.Event()
    eventually(lambda: layer.asked() == [""])
    second = Background(lambda: fetch(store, layer, given_up))
    eventually(lambda: layer.web.paths().count(MANIFEST) == 2)
    given_up.set()
    with pytest.raises(DeadlineExceeded):
        second.done()
    third = Background(lambda: fetch(store, layer))
    assert is_whole(store, first.done(), qcow2)
    assert is_whole(store, third.done(), qcow2)
