"""Downloads the rest of a large file over several connections at once, if one connection is slower than the reader of its bytes.

Servers and networks often limit the speed of each connection. Whether more connections help is measured: first one is used, then
several, and the faster way stays. Meanwhile the first connection is kept, because the server may grant no other. The bytes are
passed on in order, so that a partial download is always a beginning of the file.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Generator
from typing import Final, Protocol, Self

import structlog

from virtshim.images.http_client import CHUNK, HttpResponse, redacted_url
from virtshim.images.pull_watch import PullWatch
from virtshim.model.errors import ShimError, Unavailable

# Each connection has its own thread, which requests parts of the file. If a connection fails, it is abandoned and another
# one requests its part. Servers limit the connections of a client, with any status, and mirrors may have another file than
# the server that sent the beginning.

log = structlog.get_logger(__name__)

CONNECTIONS: Final = 4
_POLL = 0.2


class Rest(Protocol):
    def __call__(self, at: int, end: int | None = None) -> HttpResponse:
        """The file from byte `at` on. With `end`, the part up to that byte: then a busy server is not waited for, and
        Unavailable is raised if it sends no part."""


class Parts:
    """Downloads bytes `at` to `size` of the file in parts of `length` bytes. A context manager: on exit it cuts the connections
    and joins all threads. At most one part more than there are connections is in memory."""

    def __init__(self, at: int, size: int, length: int, rest: Rest, watch: PullWatch) -> None:
        self._size = size
        self._length = length
        self._rest = rest
        self._watch = watch
        self._next = self._unasked = at
        self._again: list[int] = []
        self._here: dict[int, bytearray] = {}
        self._is_over = False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._working = 0

    def __enter__(self) -> Self:
        for _ in range(CONNECTIONS):
            thread = threading.Thread(target=self._work, name="image-pull-part", daemon=True)
            with self._changed:
                self._working += 1
            try:
                thread.start()
            except RuntimeError:  # the unit's thread limit is reached; the first connection needs no thread
                self._ended()
                break
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._watch.cut(self._threads)
        for thread in self._threads:
            thread.join()

    def next(self, least: int, patience: float, silence: float) -> bytearray | None:
        """The next part. None after the last part, and if waiting is useless: fewer than `least` connections are left, the part
        has not come for `patience` seconds, or no byte at all for `silence` seconds. Raises what the watch raises."""
        if self._next >= self._size:
            return None
        began = time.monotonic()
        with self._changed:
            while (part := self._here.pop(self._next, None)) is None:
                self._watch.check()
                waited = time.monotonic() - began
                if self._working < least or waited > patience or min(waited, self._watch.silent_for()) > silence:
                    return None
                self._changed.wait(min(_POLL, patience, silence))
            self._next += self._length
            self._changed.notify_all()
        return part

    def ask_no_more(self) -> None:
        """The parts that were asked for are the last ones."""
        with self._changed:
            self._size = min(self._size, self._unasked)

    def _work(self) -> None:
        """Downloads parts until none is left. Stops after the first failure if nothing has succeeded yet, else after two in a
        row."""
        is_tried = False
        try:
            while (first := self._taken()) is not None:
                is_brought = self._is_brought(first)
                if not is_brought and not is_tried:
                    return
                is_tried = is_brought
        finally:
            self._ended()

    def _ended(self) -> None:
        with self._changed:
            self._working -= 1
            self._changed.notify_all()

    def _taken(self) -> int | None:
        """The first byte of the next part to request, None if there is none."""
        with self._changed:
            while not self._is_over:
                if self._again:
                    return heapq.heappop(self._again)
                if self._unasked < min(self._size, self._next + CONNECTIONS * self._length):
                    self._unasked += self._length
                    return self._unasked - self._length
                self._changed.wait()
            return None

    def _is_brought(self, first: int) -> bool:
        part = None
        try:
            part = self._read(first, min(self._size, first + self._length))
        except ShimError as exc:
            if not self._is_over:
                log.info("image.download.part_failed", image=self._watch.name, first=first, error=str(exc))
        finally:
            with self._changed:
                if part is None:
                    heapq.heappush(self._again, first)
                else:
                    self._here[first] = part
                self._changed.notify_all()
        return part is not None

    def _read(self, first: int, end: int) -> bytearray:
        """The part as one buffer, because a source may send single bytes."""
        part = bytearray()
        with self._rest(first, end) as answer:
            while len(part) <= end - first and (chunk := answer.read()):
                part += chunk
            if len(part) != end - first:
                raise Unavailable(f"{redacted_url(answer.url)} does not send the requested parts; try again")
        return part


PIECE = 8 << 20
# Seconds for which one connection is measured, and the bytes per second that it must reach. On a slower link, each of
# several connections would be too slow.
_TRIAL = 2.0
_LEAST_RATE = 64 << 10
# Bytes that must be left, for several connections to be worth it.
_WORTH = 64 << 20
# How much faster several connections must be than one.
GAIN = 1.25
# PATIENCE: seconds to wait for the next part, or longer if one connection would need longer for all parts under way.
# SILENCE: seconds to wait for any byte while the first connection is kept. A server may hold other connections until the
# first one ends.
PATIENCE = 10.0
SILENCE = 10.0


class Trial:
    """Measures one connection while it is the only one."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._begin()

    def read(self, answer: HttpResponse) -> bytes:
        began = time.monotonic()
        chunk = answer.read()
        self._waited += time.monotonic() - began
        self._came += len(chunk)
        return chunk

    def is_waited_for(self, left: int) -> bool:
        """Whether the reader spent most of the last seconds waiting, and `left` bytes are worth more connections."""
        passed = time.monotonic() - self._began
        if passed < _TRIAL:
            return False
        self.rate = self._came / passed
        is_waited_for = self._waited * 2 >= passed and self.rate >= _LEAST_RATE and left >= _WORTH
        self._begin()
        return is_waited_for

    def is_beaten_by(self, rate: float) -> bool:
        """Whether several connections, whose last rate was `rate`, were enough faster to be tried again."""
        return rate >= GAIN * self.rate

    def _begin(self) -> None:
        self._began, self._waited, self._came = time.monotonic(), 0.0, 0


def by_several(
    at: int, size: int, rest: Rest, watch: PullWatch, alone: HttpResponse, rate: float
) -> Generator[bytes, None, None]:
    """The bytes from `at` on, over several connections, to the end or until they prove slower than one. `alone` is the first
    connection: its next byte is `at`, and it had that `rate`. It is closed once parts arrive reliably; until then the caller can
    continue with it."""
    received, came, began = watch.received, 0, time.monotonic()
    patience = max(PATIENCE, 2 * CONNECTIONS * PIECE / max(rate, _LEAST_RATE))
    silence = min(SILENCE, watch.progress_timeout / 2)
    try:
        with Parts(at, size, PIECE, rest, watch) as parts:
            for taken in itertools.count(1):
                piece = parts.next(1, patience, math.inf) if alone.is_closed else parts.next(2, patience, silence)
                if piece is None:
                    return
                for start in range(0, len(piece), CHUNK):
                    chunk = bytes(memoryview(piece)[start : start + CHUNK])
                    came += len(chunk)
                    yield chunk
                if taken == 2 * CONNECTIONS:
                    alone.close()
                    if came < GAIN * rate * (time.monotonic() - began):
                        # Parts under way are still used: if one connection fills the link, the rest of them comes soon, and
                        # asking again would bring their bytes twice.
                        parts.ask_no_more()
    finally:
        # Do not count bytes of parts that were not passed on.
        watch.received = received + came
