"""A download that is slow on one connection uses several."""

from __future__ import annotations

import gzip
import os
import socket
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any, Self

import pytest
from fakes.background import Background
from fakes.downloads import FILE, NEVER, Source, fetch, is_whole
from fakes.journal import WAIT_LIMIT
from fakes.waiting import eventually

from virtshim.images.confined import frames
from virtshim.images.disk_writer import DiskWriter
from virtshim.images.downloads import parallel, resumed
from virtshim.images.downloads.parallel import Parts
from virtshim.images.filestore import ImageFileStore
from virtshim.images.http_client import Pace
from virtshim.images.pull_watch import PullWatch
from virtshim.model.errors import DeadlineExceeded, ResourceExhausted, Unavailable

MANIFEST = "/v2/a/manifests/latest"
AT = 70_000
PIECE = 4 << 10


BEGINNING = 32 << 10


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, parts are not late."""
    monkeypatch.setattr(parallel, "PATIENCE", float(WAIT_LIMIT))
    monkeypatch.setattr(parallel, "SILENCE", float(WAIT_LIMIT))


@pytest.fixture
def by_several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection alone is too slow at once, and several are faster always."""
    source: Source = request.getfixturevalue("file" if "file" in request.fixturenames else "source")
    whole = source.web.routes[source.path]

    def route(request: Any) -> None:
        if "Range" in request.headers:
            whole(request)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(source.body)))
        request.send_header("ETag", '"1"')
        request.end_headers()
        request.wfile.write(source.body[:BEGINNING])
        source.goes_on.wait(WAIT_LIMIT)
        request.wfile.write(source.body[BEGINNING:][: source.left])
        request.close_connection = True

    source.web.routes[source.path] = route
    monkeypatch.setattr(parallel, "PIECE", PIECE)
    monkeypatch.setattr(parallel, "GAIN", 0.0)
    patient(monkeypatch)

    def is_waited_for(trial: parallel.Trial, left: int) -> bool:
        trial.rate = 1.0
        return left >= 2 * PIECE

    monkeypatch.setattr(parallel.Trial, "is_waited_for", is_waited_for)


def parts(source: Source) -> list[int]:
    """Where those began that were asked for up to an end."""
    asked = [one.removeprefix("bytes=").partition("-") for one in source.asked() if one]
    return [int(first) for first, _, last in asked if last]


def test_a_download_that_is_slow_on_one_connection_uses_several(
    source: Source, store, qcow2: bytes, by_several, partial, incoming
) -> None:
    before = threading.active_count()
    assert is_whole(store, fetch(store, source), qcow2)
    first = min(parts(source))
    assert 0 < first <= BEGINNING
    assert sorted(parts(source)) == list(range(first, len(source.body), PIECE))
    assert (partial(), incoming(), store.under_way()) == ([], [], [])
    source.goes_on.set()
    eventually(lambda: threading.active_count() <= before)


def test_no_more_connections_are_opened_than_used_at_once(source: Source, store, qcow2: bytes, by_several) -> None:
    connections: set[object] = set()
    whole = source.web.routes[source.path]

    def route(request: Any) -> None:
        connections.add(request.client_address)
        whole(request)

    source.web.routes[source.path] = route
    assert is_whole(store, fetch(store, source), qcow2)
    assert len(parts(source)) > parallel.CONNECTIONS
    assert len(connections) <= 1 + parallel.CONNECTIONS


def test_one_connection_continues_if_several_are_no_faster(
    source: Source, store, qcow2: bytes, by_several, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "GAIN", float("inf"))
    assert is_whole(store, fetch(store, source), qcow2)
    assert 2 * parallel.CONNECTIONS <= len(parts(source)) <= 3 * parallel.CONNECTIONS
    assert len(parts(source)) == len(set(parts(source)))
    assert source.asked()[-1] == f"bytes={max(parts(source)) + PIECE}-"


def test_a_server_that_ignores_ranges_is_read_over_one_connection(
    source: Source, store, qcow2: bytes, by_several
) -> None:
    slow, asked = source.web.routes[source.path], []

    def route(request: Any) -> None:
        asked.append(request.headers.get("Range", ""))
        if len(asked) > 1:
            source.goes_on.set()
        (source.web.routes["/all"] if len(asked) > 1 else slow)(request)

    source.web.serve("/all", source.body, ETag='"1"')
    source.web.routes[source.path] = route
    assert is_whole(store, fetch(store, source), qcow2)
    assert asked[0] == ""
    assert 1 < len(asked) <= 1 + parallel.CONNECTIONS


@pytest.mark.parametrize("cut", [0, 1000])
def test_an_interrupted_part_is_resumed_over_one_connection(
    source: Source, store, qcow2: bytes, by_several, cut: int
) -> None:
    whole, cuts = source.web.routes[source.path], [cut]

    def route(request: Any) -> None:
        if "Range" not in request.headers or request.headers["Range"].endswith("-") or not cuts:
            whole(request)
            return
        source.cut(cuts.pop())
        source.web.routes[source.path](request)
        source.web.routes[source.path] = route

    source.web.routes[source.path] = route
    assert is_whole(store, fetch(store, source), qcow2)


def test_parts_of_a_file_that_changes_between_them_are_not_mixed(
    web, file: Source, store, qcow2: bytes, by_several
) -> None:
    whole, newer = web.routes[FILE], qcow2 + bytes(512)

    file.left = 0

    def route(request: Any) -> None:
        if len(parts(file)) == 3:
            file.goes_on.set()
            web.serve_parts(FILE, newer, etag='"2"')
        web.routes[FILE](request) if len(parts(file)) >= 3 else whole(request)

    web.routes[FILE] = route
    with pytest.raises(Unavailable, match="has changed while it was downloaded"):
        fetch(store, file)
    assert is_whole(store, fetch(store, file), newer)


def test_a_download_over_several_connections_is_resumed_after_a_restart(
    source: Source, make_store: Callable[..., ImageFileStore], qcow2: bytes, by_several, partial
) -> None:
    """What is kept is a beginning, without holes."""
    whole = source.web.routes[source.path]

    def route(request: Any) -> None:
        if len(source.asked()) < 8:
            whole(request)
        else:
            source.goes_on.set()
            request.close_connection = True

    source.left = 0
    source.web.routes[source.path] = route
    with pytest.raises(Unavailable):
        fetch(make_store(), source)
    (left,) = partial()
    kept = left.read_bytes()
    assert source.body.startswith(kept)
    source.web.routes[source.path] = whole
    asked = len(source.asked())
    store = make_store()
    assert is_whole(store, fetch(store, source), qcow2)
    assert f"bytes={len(kept)}-" in source.asked()[asked:]


def test_a_pull_over_several_connections_can_be_cancelled(source: Source, store, by_several, incoming) -> None:
    before, gives_up = threading.active_count(), threading.Event()
    whole = source.web.routes[source.path]

    def route(request: Any) -> None:
        if len(parts(source)) >= 3:
            gives_up.set()
            source.web.over.wait(WAIT_LIMIT)
        else:
            whole(request)

    source.web.routes[source.path] = route
    with pytest.raises(DeadlineExceeded):
        fetch(store, source, gives_up)
    assert not [one for one in threading.enumerate() if one.name.startswith("image-pull")]
    assert incoming() == []
    source.web.over.set()
    source.goes_on.set()
    eventually(lambda: threading.active_count() <= before)


@pytest.fixture
def hanging(request: pytest.FixtureRequest, by_several) -> Source:
    """The first part comes when all connections are at work, and no other does."""
    source: Source = request.getfixturevalue("file" if "file" in request.fixturenames else "source")
    whole = source.web.routes[source.path]

    def route(request: Any) -> None:
        if "Range" in request.headers:
            eventually(lambda: len(parts(source)) >= parallel.CONNECTIONS)
            if not request.headers["Range"].startswith(f"bytes={min(parts(source))}-"):
                source.web.over.wait(WAIT_LIMIT)
                return
        whole(request)

    source.web.routes[source.path] = route
    return source


PACKED = pytest.param(("/disk.qcow2.gz", gzip.compress(os.urandom(200_000))), id="packed file")


@pytest.mark.parametrize("file", [pytest.param(None, id="file"), PACKED], indirect=True)
def test_a_failed_pull_leaves_no_thread_even_while_its_error_is_held(
    file: Source, confined_store, hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        if len(parts(file)) >= parallel.CONNECTIONS:
            raise ResourceExhausted("no room is left")

    head = frames.head
    monkeypatch.setattr(DiskWriter, "write", full)
    # What is packed goes to the child first.
    monkeypatch.setattr(frames, "head", lambda kind, size: full() or head(kind, size))
    with pytest.raises(ResourceExhausted, match="no room is left") as caught:
        fetch(confined_store, file)
    assert not [one for one in threading.enumerate() if one.name.startswith("image-pull")]
    del caught


def test_a_file_with_different_etags_behind_a_balancer_uses_one_connection(
    web, file: Source, store, qcow2: bytes, by_several
) -> None:
    """Each has an ETag of its own for the same file: what comes from others would not be a part of this one."""
    slow, asked = web.routes[FILE], []

    def route(request: Any) -> None:
        asked.append(request.headers.get("Range", ""))
        if len(asked) == 1:
            slow(request)
            return
        file.goes_on.set()
        web.serve_parts("/other", qcow2, etag=f'"{len(asked)}"')
        web.routes["/other"](request)

    web.routes[FILE] = route
    assert is_whole(store, fetch(store, file), qcow2)
    assert 1 < len(asked) <= 1 + parallel.CONNECTIONS


def test_a_file_redirected_to_different_mirrors_uses_one_connection(
    web, file: Source, store, qcow2: bytes, by_several
) -> None:
    slow, asked = web.routes[FILE], []

    def route(request: Any) -> None:
        mirror = f"/mirror-{len(asked)}"
        asked.append(mirror)
        web.serve_parts(mirror, qcow2)
        if len(asked) == 1:
            web.routes[mirror] = slow
        else:
            file.goes_on.set()
        web.answer("/there", 302, Location=web.url(mirror))
        web.routes["/there"](request)

    web.routes[FILE] = route
    assert is_whole(store, fetch(store, file), qcow2)
    assert 1 < len(asked) <= 1 + parallel.CONNECTIONS


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that servers were waited for, which takes no time here."""
    found: list[float] = []
    monkeypatch.setattr(PullWatch, "pause", lambda _, seconds: found.append(seconds))
    return found


def refuse_further(source: Source, status: int, granted: int) -> list[object]:
    """Of the connections that ask for parts, all but the first so many are refused."""
    whole, seen = source.web.routes[source.path], []
    source.web.answer("/refused", status, Retry_After="20")

    def route(request: Any) -> None:
        if "Range" in request.headers and request.client_address not in seen[:granted]:
            seen.append(request.client_address)
            if request.client_address not in seen[:granted]:
                if not granted:
                    source.goes_on.set()
                source.web.routes["/refused"](request)
                return
        if "Range" in request.headers:
            eventually(lambda: len(seen) > granted)
        whole(request)

    source.web.routes[source.path] = route
    return seen


STATUSES = pytest.mark.parametrize("status", [403, 404, 429, 503])


@STATUSES
def test_a_download_continues_on_the_one_connection_that_the_server_allows(
    source: Source, store, qcow2: bytes, by_several, pauses, status: int
) -> None:
    refused = refuse_further(source, status, granted=0)
    assert is_whole(store, fetch(store, source), qcow2)
    assert 1 < len(refused) <= parallel.CONNECTIONS
    assert source.asked().count("") == 1
    assert pauses == []


@STATUSES
def test_a_download_uses_the_few_connections_that_the_server_allows(
    source: Source, store, qcow2: bytes, by_several, pauses, status: int
) -> None:
    refuse_further(source, status, granted=2)
    assert is_whole(store, fetch(store, source), qcow2)
    assert set(parts(source)) == set(range(min(parts(source)), len(source.body), PIECE))
    assert not source.goes_on.is_set()
    assert pauses == []


def test_a_server_that_closes_each_connection_does_not_exhaust_descriptors(
    source: Source, store, qcow2: bytes, by_several, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "PIECE", PIECE // 4)
    whole, opened = source.web.routes[source.path], []

    def route(request: Any) -> None:
        opened.append(len(os.listdir("/proc/self/fd")))
        whole(request)
        request.close_connection = True

    source.web.routes[source.path] = route
    assert is_whole(store, fetch(store, source), qcow2)
    assert len(parts(source)) > 20 * parallel.CONNECTIONS
    assert max(opened) < min(opened) + 10 * parallel.CONNECTIONS


class Sent:
    """Bytes that come by few, or not at all."""

    url = "http://source.test/"
    is_closed = False

    def __init__(self, watch: PullWatch, left: int, at_once: int) -> None:
        self._watch, self._left, self._at_once = watch, left, at_once

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def close(self) -> None:
        self.is_closed = True

    def read(self) -> bytes:
        while not self._at_once:
            self._watch.check()
            self._watch.pause(0.001)
        taken = min(self._at_once, self._left)
        self._left -= taken
        return bytes(taken)


def test_bytes_that_arrive_in_small_pieces_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    length = 1 << 15
    monkeypatch.setattr(parallel, "PIECE", length)
    patient(monkeypatch)
    size = parallel.CONNECTIONS * length
    with PullWatch("x", NEVER, 60) as watch:
        rest: Any = lambda at, end=None: Sent(watch, end - at, 2)  # noqa: E731
        alone: Any = Sent(watch, 0, 1)
        tracemalloc.start()
        chunks = [len(chunk) for chunk in parallel.by_several(0, size, rest, watch, alone, 1.0)]
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert chunks == [length] * parallel.CONNECTIONS
    assert most < 3 * size


@pytest.mark.parametrize("becomes_slower", [True, False])
def test_several_are_tried_again_where_one_becomes_slower_than_they_were(
    monkeypatch: pytest.MonkeyPatch, becomes_slower: bool
) -> None:
    length = 1 << 12
    monkeypatch.setattr(parallel, "PIECE", length)
    monkeypatch.setattr(parallel, "GAIN", float("inf"))

    def is_waited_for(trial: parallel.Trial, left: int) -> bool:
        trial.rate = 1.0
        return left >= 2 * length

    monkeypatch.setattr(parallel.Trial, "is_waited_for", is_waited_for)
    monkeypatch.setattr(parallel.Trial, "is_beaten_by", lambda _, rate: becomes_slower and rate > 0)
    patient(monkeypatch)
    size, asked = 40 * length, []
    with PullWatch("x", NEVER, 60) as watch:

        def rest(at: int, end: int | None = None) -> Any:
            asked.append((at, end))
            return Sent(watch, (end or size) - at, 1 << 10)

        assert sum(map(len, resumed.body(None, 0, rest, watch, size))) == size
    parts = [at for at, end in asked if end is not None]
    assert len(parts) == len(set(parts))
    assert (max(parts) > 20 * length) is becomes_slower
    assert (len(asked) - len(parts) > 2) is becomes_slower


@pytest.mark.parametrize(("patience", "silence"), [(0.0, 60.0), (60.0, 0.0)])
def test_a_late_part_is_no_longer_waited_for(patience: float, silence: float) -> None:
    with PullWatch("x", NEVER, 60) as watch:
        rest: Any = lambda at, end=None: Sent(watch, end - at, 0)  # noqa: E731
        with Parts(0, 100, 10, rest, watch) as parts:
            assert parts.next(1, patience, silence) is None
        assert not [one for one in threading.enumerate() if one.name.startswith("image-pull-part")]


def test_a_part_below_the_minimum_rate_is_requested_over_another_connection(
    source: Source, store, qcow2: bytes, by_several, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, slow = source.web.routes[source.path], threading.Event()
    kept = Pace.is_kept

    def is_kept(pace: Pace, count: int, waited: float) -> bool:
        if threading.current_thread().name == "image-pull-part" and not slow.is_set():
            slow.set()
            return False
        return kept(pace, count, waited)

    monkeypatch.setattr(Pace, "is_kept", is_kept)
    assert is_whole(store, fetch(store, source), qcow2)
    assert slow.is_set()
    assert len(parts(source)) == len(set(parts(source))) + 1
    assert source.web.routes[source.path] is whole


def test_a_connection_that_a_cancelled_thread_opens_is_closed_and_others_continue() -> None:
    ours, theirs = socket.socketpair()
    with PullWatch("x", NEVER, 60) as watch, ours, theirs:
        watch.guard(theirs)
        cut = Background(lambda: (watch.cut([threading.current_thread()]), watch.guard(ours)))
        with pytest.raises(Unavailable, match="no longer needed"):
            cut.done()
        ours.close()
        assert theirs.recv(1) == b""
        watch.check()


def test_a_cancelled_socket_is_shut_down_for_the_other_side() -> None:
    ours, theirs = socket.socketpair()
    with PullWatch("x", NEVER, 60) as watch, ours, theirs:
        watch.guard(ours)
        watch.cut([threading.current_thread()])
        assert theirs.recv(1) == b""


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(parallel.time, "monotonic", lambda: self.now)


class Answered:
    """Each of its chunks takes a while."""

    def __init__(self, clock: Clock, count: int, takes: float) -> None:
        self._clock, self._count, self._takes = clock, count, takes

    def read(self) -> bytes:
        self._clock.now += self._takes
        return bytes(self._count)


@pytest.mark.parametrize(
    ("count", "takes", "used", "left", "by_several"),
    [
        pytest.param(1 << 20, 0.1, 0.0, 1 << 30, True, id="it is waited for"),
        pytest.param(1 << 20, 0.1, 0.2, 1 << 30, False, id="what is done with it takes longer"),
        pytest.param(1 << 20, 0.1, 0.0, 1 << 20, False, id="it is nearly here"),
        pytest.param(1 << 10, 0.1, 0.0, 1 << 30, False, id="the link is slow"),
    ],
)
def test_several_connections_are_tried_only_if_one_is_the_bottleneck(
    monkeypatch: pytest.MonkeyPatch, count: int, takes: float, used: float, left: int, by_several: bool
) -> None:
    clock = Clock(monkeypatch)
    trial, answer = parallel.Trial(), Answered(clock, count, takes)
    found = []
    for _ in range(100):
        trial.read(answer)  # type: ignore[arg-type]
        clock.now += used
        found.append(trial.is_waited_for(left))
    assert any(found) is by_several
    assert not any(found[: int(1.9 / (takes + used))])


def test_only_the_time_spent_waiting_counts_for_a_sources_rate() -> None:
    pace = Pace(least=1000, window=60)
    assert all(pace.is_kept(1, waited=0.001) for _ in range(10_000))
    assert not all(pace.is_kept(1, waited=1.0) for _ in range(60))


def test_a_sources_rate_is_checked_for_each_window_separately() -> None:
    pace = Pace(least=1000, window=60)
    assert pace.is_kept(1 << 30, waited=60)
    assert pace.is_kept(60_000, waited=60)
    assert not pace.is_kept(59_000, waited=60)
