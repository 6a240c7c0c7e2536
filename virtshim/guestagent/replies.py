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


class ReplyReader:
    """Starts out of step: all is skipped up to 0xFF."""

    def __init__(self) -> None:
        self._skipping = True
        self._skipped = 0
        self._line = bytearray()

    def feed(self, data: bytes) -> list[Reply]:
        """The replies completed by these bytes. Raises BadReply."""
        if self._skipping:
            _, mark, data = data.partition(_SYNC)
            if not mark:
                self._skipped += len(_)
                if self._skipped > MAX_SKIPPED:
                    raise BadReply("it keeps sending data and does not answer")
                return []
            self._skipping = False
        replies: list[Reply] = []
        *lines, rest = data.split(b"\n")
        for piece in lines:
            self._take(piece)
            line, self._line = bytes(self._line), bytearray()
            if line.strip():
                replies.append(_reply(line))
        self._take(rest)
        return replies

    def _take(self, piece: bytes) -> None:
        before, mark, after = piece.rpartition(_SYNC)
        del before
        if mark:  # never part of JSON text: what stood before it was cut off
            self._line.clear()
        self._line += after
        if len(self._line) > MAX_LINE:
            raise BadReply(f"it sent a line of more than {MAX_LINE} bytes")


def _reply(line: bytes) -> Reply:
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
