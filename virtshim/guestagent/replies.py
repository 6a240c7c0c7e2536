"""The guest agent's side of the wire, as bytes come in: JSON lines, with 0xFF before the answer to a
`guest-sync-delimited`. Pure. Nothing the guest sends is trusted: lines are bounded, and what is no reply is an error.

Protocol: docs.qemu.org, "QEMU Guest Agent Protocol Reference".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from virtshim.domain.printable import printable_text

# The longest replies that are asked for are lists of file systems and interfaces.
MAX_LINE = 1 << 20
# Nobody asks for more than one at a time; after a request to start anew an older answer may come with its own.
_MAX_REPLIES = 8
# Bytes that the answer to a command may have: what is longer costs more to read than to say.
_ROOM: Mapping[str, int] = {
    "guest-file-read": 256 << 10,
    "guest-get-fsinfo": MAX_LINE,
    "guest-get-users": MAX_LINE,
    "guest-info": MAX_LINE,
    "guest-network-get-interfaces": MAX_LINE,
}
_USUAL_ROOM = 16 << 10
# How much an agent may have left over from earlier talk before it answers a sync.
MAX_SKIPPED = 8 << 20

_SYNC = b"\xff"


class BadReply(Exception):
    """What came cannot be the agent's answer; the connection is of no use any more."""


@dataclass(frozen=True, slots=True)
class Returned:
    """`value` is any JSON value."""

    value: Any


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The agent's own error. `kind` is a word for programs (`CommandNotFound`, `GenericError`), `message` is for people."""

    kind: str
    message: str


Reply = Returned | ErrorReply


def command_line(name: str, arguments: Mapping[str, Any] | None = None) -> bytes:
    """One request."""
    request = {"execute": name, **({"arguments": arguments} if arguments else {})}
    return json.dumps(request).encode() + b"\n"


def sync_line(number: int) -> bytes:
    """A request to start anew: 0xFF ends whatever half line the agent still holds."""
    return _SYNC + command_line("guest-sync-delimited", {"id": number})


def room_for_answer(command: str) -> int:
    """The bytes of a line that can be the answer to it."""
    return _ROOM.get(command, _USUAL_ROOM)


class ReplyReader:
    """Starts out of step: all is skipped up to 0xFF. `room`: the bytes of a line."""

    def __init__(self) -> None:
        self._skipping = True
        self._skipped = 0
        self._line = bytearray()
        self.room = MAX_LINE

    def feed(self, data: bytes) -> list[Reply]:
        """The replies completed by these bytes; what came before a 0xFF is to older requests, and is not looked at. Raises
        BadReply."""
        _, mark, data = data.rpartition(_SYNC)
        if mark:  # never part of JSON text: what stood before it was cut off
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
    """One short printable line of what the guest wrote."""
    words = value if isinstance(value, str) else ""
    return printable_text(words[:300])
