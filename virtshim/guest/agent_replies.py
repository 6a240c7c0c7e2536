"""Reads an agent's replies as bytes arrive, and limits how much unrequested data is read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from virtshim.model.text import printable_text
from virtshim.system.rate_limits import TokenBucket

# The wire format: JSON lines, with 0xFF before the answer to a `guest-sync-delimited`. Pure. Nothing that the guest
# sends is trusted: lines are bounded, and anything but a reply is an error.
#
# Protocol: docs.qemu.org, "QEMU Guest Agent Protocol Reference".

# The longest replies are lists of file systems and interfaces.
MAX_LINE = 1 << 20
# Requests are made one at a time, but after a sync request an older answer may arrive with its own.
_MAX_REPLIES = 8
# The longest answer to a command in bytes, because reading a long answer costs more than sending it.
_ROOM: Mapping[str, int] = {
    "guest-file-read": 256 << 10,
    "guest-get-fsinfo": MAX_LINE,
    "guest-get-users": MAX_LINE,
    "guest-info": MAX_LINE,
    "guest-network-get-interfaces": MAX_LINE,
}
_USUAL_ROOM = 16 << 10
# How many bytes of earlier answers an agent may send before it answers a sync.
MAX_SKIPPED = 8 << 20

_SYNC = b"\xff"


class BadReply(Exception):
    """The data cannot be the agent's answer. The connection is useless from now on."""


@dataclass(frozen=True, slots=True)
class Returned:
    """`value` is any JSON value."""

    value: Any


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The agent's error. `kind`: a word for programs (`CommandNotFound`, `GenericError`). `message`: for people."""

    kind: str
    message: str


Reply = Returned | ErrorReply


def command_line(name: str, arguments: Mapping[str, Any] | None = None) -> bytes:
    """The bytes of one request."""
    request = {"execute": name, **({"arguments": arguments} if arguments else {})}
    return json.dumps(request).encode() + b"\n"


def sync_line(number: int) -> bytes:
    """The bytes of a sync request; its 0xFF ends any half line that the agent still holds."""
    return _SYNC + command_line("guest-sync-delimited", {"id": number})


def room_for_answer(command: str) -> int:
    """The longest line that can be an answer to the command, in bytes."""
    return _ROOM.get(command, _USUAL_ROOM)


class ReplyReader:
    """Skips everything up to the first 0xFF. `room`: the longest line in bytes."""

    def __init__(self) -> None:
        self._skipping = True
        self._skipped = 0
        self._line = bytearray()
        self.room = MAX_LINE

    def feed(self, data: bytes) -> list[Reply]:
        """The replies that these bytes complete. Data before a 0xFF answers older requests and is ignored. Raises
        BadReply."""
        _, mark, data = data.rpartition(_SYNC)
        if mark:  # 0xFF is never part of JSON, so the text before it was cut off
            self._line.clear()
            self._skipping = False
        elif self._skipping:
            self._skipped += len(data)
            if self._skipped > MAX_SKIPPED:
                raise BadReply("it keeps sending data and does not answer")
            return []
        beginning, newline, more = data.partition(b"\n")
        self._hold(beginning)
        if not newline:
            return []
        first, self._line = bytes(self._line), bytearray()
        *others, rest = more.split(b"\n")
        self._hold(rest)
        lines = [line for line in (first, *others) if line.strip()]
        if len(lines) > _MAX_REPLIES:
            raise BadReply("it sent answers that were not asked for")
        return [_reply(line, self.room) for line in lines]

    def _hold(self, piece: bytes) -> None:
        self._line += piece
        if len(self._line) > self.room:
            raise BadReply(f"it sent a line of more than {self.room} bytes")


def _reply(line: bytes, room: int) -> Reply:
    if len(line) > room:
        raise BadReply(f"it sent a line of more than {room} bytes")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise BadReply("it sent something that is not JSON") from exc
    if not isinstance(value, dict):
        raise BadReply("it sent JSON that is not an object")
    if "return" in value:
        return Returned(value["return"])
    error = value.get("error")
    if not isinstance(error, dict):
        raise BadReply("it sent an object that is neither an answer nor an error")
    return ErrorReply(_text(error.get("class")), _text(error.get("desc")))


def _text(value: object) -> str:
    """A short printable line of what the guest wrote."""
    words = value if isinstance(value, str) else ""
    return printable_text(words[:300])


log = structlog.get_logger(__name__)

# Bytes a second, and how many at once. An agent may still have to send the rest of an interrupted answer.
RATE: Final = 64 << 10
BURST: Final = 2 << 20
# A read of few bytes counts as this many, because it costs as much.
CRUMB: Final = 4 << 10
# The reads of the shortest answer, and the bytes that each further read must bring. The guest's kernel passes on 32 KiB
# at a time; an answer that fits is one read.
_FREE_READS: Final = 16
_PIECE: Final = 1 << 10
# Seconds between two log lines about the same guest.
_TELL_AGAIN: Final = 300.0


class JunkBudget:
    """The allowance of one VM for all its connections. A guest that has used it up is ignored until it has grown
    again."""

    def __init__(self, channel: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._now = monotonic
        self._bucket = TokenBucket(RATE, BURST, monotonic())
        self._told_at = -_TELL_AGAIN

    def spend(self, size: int) -> None:
        """Raises BadReply if this is too much."""
        now = self._now()
        self._bucket.spend(max(size, CRUMB), now)
        if self._bucket.wait(now):
            if now - self._told_at >= _TELL_AGAIN:
                self._told_at = now
                log.warning("agent.flooded", socket=self._channel, bytes_a_second=RATE)
            raise BadReply("it keeps sending data that it was not asked for")

    def wait(self) -> float:
        """Seconds until the channel may be read again, 0 for now."""
        return self._bucket.wait(self._now())


class AnswerMeter:
    """The allowance of one answer: `most` bytes, in pieces of reasonable size."""

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
