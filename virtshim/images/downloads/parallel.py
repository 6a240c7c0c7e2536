"""The rest of a large content by several connections at once, where one alone is slower than what is done with its bytes.

Servers, and what is on the way to them, often give each connection a share. Whether it pays is tried: first one alone, then
several, while the one is kept, for it may be the only one that the server grants; what is faster stays. The bytes are passed
on in their order, so that what was kept of them is a beginning always.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Generator
from types import TracebackType
from typing import Final, Protocol, Self

import structlog

from virtshim.images.http_client import CHUNK, HttpResponse, redacted_url
from virtshim.images.pull_watch import PullWatch
from virtshim.model.errors import ShimError, Unavailable

# Parts of a content, each asked for on its own, by several connections at once; they are handed out in their order.
#
# A connection is a thread's. One that brings nothing is given up, and what it was to bring is asked for by another:
# servers limit how many each client may have, by statuses of any kind, and mirrors may have other contents than the
# one that sent the beginning.

log = structlog.get_logger(__name__)

CONNECTIONS: Final = 4
_POLL = 0.2


class Rest(Protocol):
    def __call__(self, at: int, end: int | None = None) -> HttpResponse:
        """The content from byte `at` on, up to byte `end` if one is given: then as a part, for which nobody waits, or Unavailable
        is raised."""


class Parts:
    """Of the content from byte `at` to byte `size`, `length` bytes each. A context manager: no thread is left behind it, nor
    waited for long, for what it still reads is cut. One part more than there are connections is in memory at most."""

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
            except RuntimeError:  # the unit has no more of them: one connection needs none
                self._ended()
                break
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._watch.cut(self._threads)
        for thread in self._threads:
            thread.join()

    def next(self, least: int, patience: float, silence: float) -> bytearray | None:
        """The next part. None behind the last one, and when there is no use in waiting: fewer than `least` connections are left,
        it has not come for `patience` seconds, or nothing at all for `silence`. Raises what the watch does."""
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

    def _work(self) -> None:
        """Brings parts until none is left, or twice in a row, at first once, one does not come."""
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
        """Where the first part begins that is to be asked for, None when none is any more."""
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
        """In one piece: a source may send single bytes."""
        part = bytearray()
        with self._rest(first, end) as answer:
            while len(part) <= end - first and (chunk := answer.read()):
                part += chunk
            if len(part) != end - first:
                raise Unavailable(f"{redacted_url(answer.url)} does not send the parts that it is asked for; try again")
        return part


PIECE = 8 << 20
# Seconds that one connection is watched, and what it has to bring in each: where less comes, more of them would starve.
_TRIAL = 2.0
_LEAST_RATE = 64 << 10
# Bytes that have to be left.
_WORTH = 64 << 20
# So much faster several have to be than one.
GAIN = 1.25
# Seconds that the next part is waited for, if one connection alone would not take longer for all that are under way; and those
# without a byte of any, while one connection is there to go on with: a server may let further ones wait for its end.
PATIENCE = 10.0
SILENCE = 10.0


class Trial:
    """One connection, while it is read alone."""

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
        """Whether it was for most of the last seconds, with so many bytes to come."""
        passed = time.monotonic() - self._began
        if passed < _TRIAL:
            return False
        self.rate = self._came / passed
        is_waited_for = self._waited * 2 >= passed and self.rate >= _LEAST_RATE and left >= _WORTH
        self._begin()
        return is_waited_for

    def _begin(self) -> None:
        self._began, self._waited, self._came = time.monotonic(), 0.0, 0


def by_several(
    at: int, size: int, rest: Rest, watch: PullWatch, alone: HttpResponse, rate: float
) -> Generator[bytes, None, None]:
    """The bytes from `at` on, to the last one, or as far as it seemed worth while: `alone`, whose next byte that is, had that
    `rate`. It is closed as soon as parts have proved to come; before, whoever cannot have them goes on with it."""
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
                        return
    finally:
        # Of parts that were asked for in vain, too, bytes have come.
        watch.received = received + came
