"""The rest of a large content by several connections at once, where one alone is slower than what is done with its bytes.

Servers, and what is on the way to them, often give each connection a share. Whether it pays is tried: first one alone, then
several, while the one is kept, for it may be the only one that the server grants; what is faster stays. The bytes are passed
on in their order, so that what was kept of them is a beginning always.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Generator

from virtshim.images.downloads.parts import CONNECTIONS, Parts, Rest
from virtshim.images.http_client import CHUNK, HttpResponse
from virtshim.images.pull_watch import PullWatch

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
