"""Parts of a content, each asked for on its own, by several connections at once; they are handed out in their order.

A connection is a thread's. One that brings nothing is given up, and what it was to bring is asked for by another: servers limit
how many each client may have, by statuses of any kind, and mirrors may have other contents than the one that sent the beginning.
"""

from __future__ import annotations

import heapq
import threading
import time
from types import TracebackType
from typing import Final, Protocol, Self

import structlog

from virtshim.domain.errors import ShimError, Unavailable
from virtshim.images.http_client import HttpResponse, redacted_url
from virtshim.images.pull_watch import PullWatch

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
