"""A server that is busy is asked again when it says."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

from virtshim.images.http_client import HttpResponse
from virtshim.images.pull_watch import PullWatch

# What it asks for is waited for if it is not long, so often; kubelet waits longer by itself.
_LONGEST_WAIT = 30
_WAITS = 3


def answered(ask: Callable[[], HttpResponse], watch: PullWatch) -> HttpResponse:
    """What `ask` got in the end, which may still be that the server is busy."""
    for _ in range(_WAITS):
        answer = ask()
        seconds = retry_after(answer)
        if seconds is None or seconds > _LONGEST_WAIT:
            return answer
        answer.close()
        watch.pause(seconds)
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
    except ValueError:
        return None


def again(seconds: int | None) -> str:
    """When a server that is busy may be asked again: the end of a sentence."""
    return "try again later" if seconds is None else f"try again in {seconds} s"
