"""A server that is busy is asked again when it says."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import TypeVar

from virtshim.domain.errors import Unavailable
from virtshim.images.http_client import HttpResponse
from virtshim.images.pull_watch import PullWatch

_T = TypeVar("_T")

# What it asks for is waited for if it is not long, so often; kubelet waits longer by itself.
_LONGEST_WAIT = 30
_WAITS = 3


class Busy(Unavailable):
    """`seconds`: it may be asked again then."""

    def __init__(self, text: str, seconds: int) -> None:
        super().__init__(text)
        self.seconds = seconds


def answered(ask: Callable[[], _T], watch: PullWatch) -> _T:
    """What `ask` gives in the end; it raises Busy, and that may be what is raised in the end, too."""
    for _ in range(_WAITS):
        try:
            return ask()
        except Busy as exc:
            if exc.seconds > _LONGEST_WAIT:
                raise
            watch.pause(exc.seconds)
    return ask()


def retry_after(answer: HttpResponse) -> int | None:
    """Seconds, if the server is busy and says for how long."""
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
    """Of a server that is busy, or broken. `text`: what it does."""
    if seconds is None:
        return Unavailable(f"{text}; try again later")
    return Busy(f"{text}; try again in {seconds} s", seconds)
