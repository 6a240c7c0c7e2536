"""Resumes a download that breaks off, and waits for busy servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TypeVar

import structlog

from virtshim.images.downloads.parallel import Rest, Trial, by_several
from virtshim.images.downloads.places import also_written, kept
from virtshim.images.http_client import HttpResponse, byte_count, redacted_url
from virtshim.images.pull_watch import PullWatch
from virtshim.model.errors import ShimError, Unavailable

_T = TypeVar("_T")

# The longest Retry-After that a pull waits for, and how often it waits. For longer times kubelet repeats the pull.
_LONGEST_WAIT = 30
_WAITS = 3


class Busy(Unavailable):
    """`seconds`: the server may be asked again after this time."""

    def __init__(self, text: str, seconds: int) -> None:
        super().__init__(text)
        self.seconds = seconds


def answered(ask: Callable[[], _T], watch: PullWatch) -> _T:
    """The result of `ask`, which is repeated if it raises Busy. Raises Busy if the server asks for too long or too many waits."""
    for _ in range(_WAITS):
        try:
            return ask()
        except Busy as exc:
            if exc.seconds > _LONGEST_WAIT:
                raise
            watch.pause(exc.seconds)
    return ask()


def retry_after(answer: HttpResponse) -> int | None:
    """The seconds after which a busy server may be asked again, None if it does not say."""
    text = answer.headers.get("Retry-After", "").strip()
    if answer.status not in (429, 503) or not text:
        return None
    if text.isascii() and text.isdigit():
        return int(text[:9])
    try:
        return max(0, round(parsedate_to_datetime(text).timestamp() - time.time()))
    except (ValueError, OverflowError):
        return None


def refusal(text: str, seconds: int | None) -> Unavailable:
    """The error for a server that is busy or broken. `text`: what the server does. `seconds`: when to ask again."""
    if seconds is None:
        return Unavailable(f"{text}; try again later")
    return Busy(f"{text}; try again in {seconds} s", seconds)


log = structlog.get_logger(__name__)

# Pauses before each further try. They start again after a try that received `_ENOUGH` bytes.
PAUSES = (0.0, 1.0, 4.0)
_ENOUGH = 1 << 20


def body(
    answer: HttpResponse | None, at: int, rest: Rest | None, watch: PullWatch, size: int | None = None
) -> Generator[bytes, None, None]:
    """The bytes from `at` on, first from `answer` if there is one. `rest` requests the bytes from a position on; without it the
    download cannot be resumed. `size`: of the whole file; allows several connections. Raises Unavailable if the download breaks
    off repeatedly, and what `rest` raises."""
    pauses = iter(PAUSES)
    begun = at
    reading = _Reading(answer, at, rest, watch, size)
    while True:
        try:
            yield from reading.chunks()
            return
        except Unavailable as exc:
            if reading.at - begun >= _ENOUGH:
                begun, pauses = reading.at, iter(PAUSES)
            pause = next(pauses, None)
            if pause is None or rest is None:
                raise
            watch.pause(pause)
            log.info("image.download.resumed", image=watch.name, bytes=reading.at, error=str(exc))


class _Reading:
    """A download, which has reached byte `at`."""

    def __init__(
        self, answer: HttpResponse | None, at: int, rest: Rest | None, watch: PullWatch, size: int | None
    ) -> None:
        self.at = at
        self._answer = answer
        self._rest = rest
        self._watch = watch
        # Bytes per second of one connection, and of several at the last try.
        self._rate = self._rate_of_several = 0.0
        # The whole size while several connections may be tried, then None.
        self._size = size if rest is not None else None

    def chunks(self) -> Generator[bytes, None, None]:
        """The remaining bytes. After an error it can be called again."""
        answer, self._answer = self._answer, None
        if answer is None:
            if self._rest is None:
                return
            answer = self._rest(self.at)
        while True:
            with answer:
                if (yield from self._by_one(answer)) or self._size is None or self._rest is None:
                    return
                size, self._size = self._size, None
                yield from self._by_several(answer, size, self._rest)
                if not answer.is_closed:
                    yield from self._by_one(answer)
                    return
            if self.at >= size:
                return
            answer, self._size = self._rest(self.at), size

    def _by_one(self, answer: HttpResponse) -> Generator[bytes, None, bool]:
        """Reads over one connection. Returns true at the end, false if several connections should be tried.

        Several are tried again if the one becomes slower than they were. TCP is often fast until its first losses. The first
        seconds of a further connection do not count, because TCP starts slowly."""
        trial, is_settled = Trial(), False
        while chunk := trial.read(answer):
            self.at += len(chunk)
            yield chunk
            if self._size is not None and trial.is_waited_for(self._size - self.at):
                self._rate = trial.rate
                if not self._rate_of_several or (is_settled and trial.is_beaten_by(self._rate_of_several)):
                    return False
                is_settled = True
        return True

    def _by_several(self, answer: HttpResponse, size: int, rest: Rest) -> Generator[bytes, None, None]:
        """Reads over several connections as far as they get. Then `answer` is closed, or at the same byte."""
        began, started = self.at, time.monotonic()
        log.info("image.download.by_several", image=self._watch.name, bytes=began, rate=round(self._rate))
        with contextlib.closing(by_several(began, size, rest, self._watch, answer, self._rate)) as chunks:
            for chunk in chunks:
                self.at += len(chunk)
                yield chunk
        self._rate_of_several = (self.at - began) / max(time.monotonic() - started, 0.001)
        if self.at == size:
            answer.close()
        elif not answer.is_closed:
            answer.skip(self.at - began)


def by_way_of(
    part: Path | None,
    size: int | None,
    answer: HttpResponse | None,
    rest: Rest | None,
    watch: PullWatch,
) -> Generator[bytes, None, None]:
    """The whole file of that size: first the bytes in `part`, then the rest, which is also appended to `part`. `answer` begins at
    the first byte; for `rest` see `body`."""
    at = 0
    for chunk in kept(part) if part else ():
        at += len(chunk)
        watch.progressed(len(chunk))
        yield chunk
    if at == 0 or at != size:
        chunks = body(None if at else answer, at, rest, watch, size)
        yield from also_written(chunks, part) if part else chunks


def rest_range(at: int, end: int | None = None) -> dict[str, str]:
    """The header that requests the bytes from `at` on, up to `end` if it is given."""
    if end is not None:
        return {"Range": f"bytes={at}-{end - 1}"}
    return {"Range": f"bytes={at}-"} if at else {}


def from_byte(answer: HttpResponse, at: int, end: int | None = None) -> HttpResponse:
    """The answer, positioned at byte `at` even if the server sends the whole file. With `end`, a whole file is refused."""
    first = _first_byte(answer) if end is None or answer.status == 206 else None
    try:
        if first is None or first > at or not answer.skip(at - first):
            raise Unavailable(f"{redacted_url(answer.url)} does not send the rest from byte {at} on; try again")
    except ShimError:
        answer.close()
        raise
    return answer


def whole_length(answer: HttpResponse) -> int | None:
    """The size of the whole file, even if the answer is a part of it. None if the server does not say."""
    if answer.status != 206:
        return answer.length()
    return byte_count(answer.headers.get("Content-Range", "").rpartition("/")[2])


def _first_byte(answer: HttpResponse) -> int | None:
    """The position of the body's first byte in the file. None for a part whose position is unknown."""
    if answer.status != 206:
        return 0
    unit, _, span = answer.headers.get("Content-Range", "").partition(" ")
    return byte_count(span.partition("-")[0]) if unit == "bytes" else None
