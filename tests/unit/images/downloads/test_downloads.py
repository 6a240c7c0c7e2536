"""Each content is downloaded once at a time, and an interrupted download is resumed."""

from __future__ import annotations

import errno
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
from fakes.downloads import FILE, NEVER, Source, fetch, is_whole
from fakes.journal import WAIT_LIMIT
from fakes.registry import FakeRegistry
from fakes.waiting import eventually
from fakes.webserver import WebServer, serving

from virtshim.images import disk_writer
from virtshim.images.disk_writer import DiskWriter
from virtshim.images.downloads import places
from virtshim.images.filestore import ImageFileStore
from virtshim.model.errors import DeadlineExceeded, InvalidRequest, ResourceExhausted, Unavailable

MANIFEST = "/v2/a/manifests/latest"
AT = 70_000


def test_an_interrupted_download_is_resumed_in_the_same_pull(
    source: Source, store, qcow2: bytes, partial, incoming
) -> None:
    source.cut(AT, 10_000, 500)
    assert is_whole(store, fetch(store, source), qcow2)
    assert source.asked() == ["", *(f"bytes={at}-" for at in (AT, AT + 10_000, AT + 10_500))]
    assert (partial(), incoming()) == ([], [])


def test_an_interrupted_download_is_resumed_after_a_restart(
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


def test_a_download_of_a_killed_process_is_resumed(
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


def test_a_server_without_range_requests_sends_the_whole_file_again(web, file: Source, store, qcow2: bytes) -> None:
    file.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, file)
    web.serve(FILE, qcow2, ETag='"1"')
    assert is_whole(store, fetch(store, file), qcow2)


def test_a_registry_without_range_requests_sends_the_whole_layer_again(web, layer: Source, store, qcow2: bytes) -> None:
    layer.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, layer)
    web.serve(layer.path, layer.body)
    assert is_whole(store, fetch(store, layer), qcow2)


def test_the_download_of_a_changed_file_starts_over(file: Source, store, qcow2: bytes, partial) -> None:
    file.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, file)
    file.body = qcow2 + bytes(512)
    file.cut(etag='"2"')
    assert is_whole(store, fetch(store, file), file.body)
    assert len(partial()) == 1


def test_parts_of_a_file_that_changes_during_the_download_are_not_mixed(web, file: Source, store, qcow2: bytes) -> None:
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


def test_a_range_other_than_the_requested_one_is_not_accepted(web, file: Source, store, qcow2: bytes) -> None:
    file.cut(AT)
    first = web.routes[FILE]

    def route(request: Any) -> None:
        if "Range" in request.headers:
            del request.headers["Range"]
            request.headers["Range"] = "bytes=0-"
        first(request)

    web.routes[FILE] = route
    assert is_whole(store, fetch(store, file), qcow2)


def test_an_interrupted_download_without_a_strong_etag_is_not_kept(file: Source, store, partial) -> None:
    file.cut(AT, 0, 0, 0, etag='W/"1"')
    with pytest.raises(Unavailable, match="broke off"):
        fetch(store, file)
    assert file.asked() == [""]
    assert partial() == []


def test_a_partial_download_damaged_on_disk_fails_at_most_one_pull(layer: Source, store, qcow2: bytes, partial) -> None:
    layer.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, layer)
    (left,) = partial()
    left.write_bytes(os.urandom(AT))
    with pytest.raises(InvalidRequest):
        fetch(store, layer)
    assert partial() == []
    assert is_whole(store, fetch(store, layer), qcow2)


def test_the_digest_in_the_name_is_also_checked_for_resumed_bytes(file: Source, store, qcow2: bytes, partial) -> None:
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


def test_a_refused_download_is_not_kept(web, store, partial) -> None:
    with pytest.raises(InvalidRequest):
        store.fetch(web.serve("/text.qcow2", b"no disk" * 100, ETag='"1"'), None, NEVER)
    assert partial() == []


def test_a_partial_download_from_an_earlier_boot_is_not_used(file: Source, make_store, qcow2: bytes, partial) -> None:
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


def test_an_unused_partial_download_is_removed_after_an_hour(web, file: Source, store, qcow2: bytes, partial) -> None:
    file.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, file)
    (left,) = partial()
    before = time.time() - places.PARTIALS_KEPT_SECONDS
    os.utime(left, (before + 60, before + 60))
    store.fetch(web.serve("/another.qcow2", qcow2), None, NEVER)
    assert partial() == [left]
    os.utime(left, (before - 60, before - 60))
    store.fetch(web.serve("/another.qcow2", qcow2), None, NEVER)
    assert partial() == []


def test_partial_downloads_are_removed_when_space_is_short(
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


def test_no_partial_layer_is_kept_if_the_disk_needs_the_space(
    layer: Source, store, partial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "free_bytes", lambda _: 3 * len(layer.body))
    layer.cut(AT, 0, 0, 0)
    with pytest.raises(Unavailable):
        fetch(store, layer)
    assert partial() == []


def test_a_layer_without_space_for_a_partial_download_is_still_pulled(
    layer: Source, store, qcow2: bytes, partial, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if "/partial/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
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


def test_a_waiting_pull_continues_when_the_downloading_one_is_cancelled(
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


def test_no_pull_waits_for_another_registry_that_sends_the_same_image_slowly(
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


def test_a_waiting_pull_can_be_cancelled(layer: Source, store, qcow2: bytes) -> None:
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
