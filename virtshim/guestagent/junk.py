"""What a guest says on its agent's channel without having been asked: how much of it is read, and when again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog

from virtshim.domain.token_bucket import TokenBucket
from virtshim.guestagent.replies import BadReply

log = structlog.get_logger(__name__)

# Bytes: a second, and at once. An agent that virtshim left in the middle of its answer still has that to say.
RATE: Final = 64 << 10
BURST: Final = 2 << 20
# A few bytes are as much work as this many.
CRUMB: Final = 4 << 10
# Reads that the shortest answer may take, and bytes that each further one must bring. The guest's kernel passes on 32 KiB at
# a time, an answer that fits is one read.
_FREE_READS: Final = 16
_PIECE: Final = 1 << 10
# Seconds between two lines of the log about one guest.
_TELL_AGAIN: Final = 300.0


class JunkBudget:
    """Of one VM, whatever becomes of its connections: a guest that has used it up is left alone until there is some again."""

    def __init__(self, channel: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._now = monotonic
        self._bucket = TokenBucket(RATE, BURST, monotonic())
        self._told_at = -_TELL_AGAIN

    def spend(self, size: int) -> None:
        """Raises BadReply when that was too much."""
        now = self._now()
        self._bucket.spend(max(size, CRUMB), now)
        if self._bucket.wait(now):
            if now - self._told_at >= _TELL_AGAIN:
                self._told_at = now
                log.warning("agent.flooded", socket=self._channel, bytes_a_second=RATE)
            raise BadReply("it keeps sending data that it was not asked for")

    def wait(self) -> float:
        """Seconds until its channel may be read again; 0 for now."""
        return self._bucket.wait(self._now())


class AnswerMeter:
    """Of one answer: `most` bytes, in pieces of a fair size."""

    def __init__(self, budget: JunkBudget, most: int) -> None:
        self._budget = budget
        self._most = most
        self._bytes = 0
        self._reads = 0

    def read(self, size: int) -> None:
        """Raises BadReply."""
        self._bytes += size
        self._reads += 1
        if self._bytes > self._most:
            self._budget.spend(self._bytes)
            raise BadReply(f"it sent {self._bytes} bytes and no answer")
        if self._reads > _FREE_READS + self._bytes // _PIECE:
            self._budget.spend(CRUMB)
