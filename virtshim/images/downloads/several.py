"""The rest of a large content by several connections at once, where one alone is slower than what is done with its bytes.

Servers, and what is on the way to them, often give each connection a share. Whether it pays is tried: first one alone, then
several; what is faster stays. The bytes are passed on in their order, so that what was kept of them is a beginning always.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Final, Protocol, Self

from virtshim.domain.errors import Unavailable
from virtshim.images.http_client import HttpResponse, redacted_url
from virtshim.images.pull_watch import PullWatch

CONNECTIONS: Final = 4
_PIECE = 8 << 20
# Seconds that one connection is watched, and what it has to bring in each: where less comes, more of them would starve.
_TRIAL = 2.0
_LEAST_RATE = 64 << 10
# Bytes that have to be left.
_WORTH = 64 << 20
# So much faster several have to be than one.
_GAIN = 1.25
_POLL = 0.2


class Rest(Protocol):
    def __call__(self, at: int, end: int | None = None) -> HttpResponse:
        """The content from byte `at` on, up to byte `end` if one is given: then as a part, or Unavailable is raised."""


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


def by_several(at: int, size: int, rest: Rest, watch: PullWatch, rate: float) -> Iterator[bytes]:
    """The bytes from `at` on, to the last one, or as far as it seemed worth while: one connection alone had that `rate`. Raises
    what `rest` does, and Unavailable when a part breaks off."""
    received, came, taken, began = watch.received, 0, 0, time.monotonic()
    starts = iter(range(at, size, _PIECE))
    try:
        with _Parts(rest, size, watch) as parts:
            for first in itertools.islice(starts, CONNECTIONS):
                parts.ask(first)
            while (piece := parts.next()) is not None:
                for first in itertools.islice(starts, 1):
                    parts.ask(first)
                for chunk in piece:
                    came += len(chunk)
                    yield chunk
                taken += 1
                if taken == 2 * CONNECTIONS and came < _GAIN * rate * (time.monotonic() - began):
                    return
    finally:
        # Of parts that were asked for in vain, too, bytes have come.
        watch.received = received + came


class _Parts:
    """What is asked for, in its order. A context manager: no thread is left behind it, nor waited for long, for what it still
    reads is cut."""

    def __init__(self, rest: Rest, size: int, watch: PullWatch) -> None:
        self._rest = rest
        self._size = size
        self._watch = watch
        self._threads = ThreadPoolExecutor(CONNECTIONS, "image-pull-part")
        self._asked: deque[Future[list[bytes]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        while left := [one for one in self._asked if not one.done()]:
            self._watch.cut()
            wait(left, timeout=_POLL)
        self._threads.shutdown()

    def ask(self, first: int) -> None:
        self._asked.append(self._threads.submit(_piece, self._rest, first, self._size))

    def next(self) -> list[bytes] | None:
        """The chunks of the first part that was asked for, None behind the last one."""
        return self._asked.popleft().result() if self._asked else None


def _piece(rest: Rest, first: int, size: int) -> list[bytes]:
    left = min(_PIECE, size - first)
    chunks = []
    with rest(first, first + left) as answer:
        while left >= 0 and (chunk := answer.read()):
            left -= len(chunk)
            chunks.append(chunk)
        if left:
            raise Unavailable(f"{redacted_url(answer.url)} does not send the parts that it is asked for; try again")
    return chunks
