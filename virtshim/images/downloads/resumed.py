"""A body that breaks off is asked for again from where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from virtshim.domain.errors import Unavailable
from virtshim.images.downloads.partials import also_written, kept
from virtshim.images.http_client import CHUNK, HttpResponse, redacted_url
from virtshim.images.pull_watch import PullWatch

log = structlog.get_logger(__name__)

# Before each further try, until one has brought enough.
_PAUSES = (0.0, 1.0, 4.0)
_ENOUGH = 1 << 20


def body(
    answer: HttpResponse | None, at: int, rest: Callable[[int], HttpResponse] | None, watch: PullWatch
) -> Iterator[bytes]:
    """The bytes from `at` on, of `answer` if there is one. `rest` asks for those from a number on; without it what breaks off
    stays so. Raises Unavailable when it breaks off again and again, and what `rest` raises."""
    pauses = iter(_PAUSES)
    begun = at
    while True:
        try:
            if answer is None and rest is not None:
                answer = rest(at)
            if answer is not None:
                with answer:
                    while chunk := answer.read():
                        at += len(chunk)
                        yield chunk
            return
        except Unavailable as exc:
            if at - begun >= _ENOUGH:
                begun, pauses = at, iter(_PAUSES)
            pause = next(pauses, None)
            if pause is None or rest is None:
                raise
            watch.pause(pause)
            answer = None
            log.info("image.download.resumed", image=watch.name, bytes=at, error=str(exc))


def by_way_of(
    part: Path | None,
    size: int | None,
    answer: HttpResponse | None,
    rest: Callable[[int], HttpResponse] | None,
    watch: PullWatch,
) -> Iterator[bytes]:
    """All of a content of that size: what the file `part` has, then the rest of it, which goes there too; `answer` and `rest` as
    in `body`, from the first byte on."""
    at = 0
    for chunk in kept(part) if part else ():
        at += len(chunk)
        watch.progressed()
        yield chunk
    if at == 0 or at != size:
        chunks = body(None if at else answer, at, rest, watch)
        yield from also_written(chunks, part) if part else chunks


def rest_range(at: int) -> dict[str, str]:
    """The header that asks for all from byte `at` on."""
    return {"Range": f"bytes={at}-"} if at else {}


def from_byte(answer: HttpResponse, at: int) -> HttpResponse:
    """The answer, its body ahead from byte `at` on also where the server sends all of it."""
    first = _first_byte(answer)
    left = -1 if first is None else at - first
    while left > 0 and (chunk := answer.read(min(left, CHUNK))):
        left -= len(chunk)
    if left:
        answer.close()
        raise Unavailable(f"{redacted_url(answer.url)} does not send what is left from byte {at} on; try again")
    return answer


def whole_length(answer: HttpResponse) -> int | None:
    """Of the file that the answer is all, or a part, of; None if the server does not say."""
    if answer.status != 206:
        return answer.length()
    total = answer.headers.get("Content-Range", "").rpartition("/")[2]
    return int(total) if total.isascii() and total.isdigit() else None


def _first_byte(answer: HttpResponse) -> int | None:
    """Of the body: 0 of a whole one, None of a part that does not say which."""
    if answer.status != 206:
        return 0
    unit, _, span = answer.headers.get("Content-Range", "").partition(" ")
    first = span.partition("-")[0]
    return int(first) if unit == "bytes" and first.isascii() and first.isdigit() else None
