"""How far a console has been written to its log, as kept across restarts. No I/O.

Every raw byte before `offset` is in the log's first `log_size` bytes (or was lost, being one of too many), and nothing else
is. What is behind `log_size` in the same file was written by a process that died before it could say so, and is written
again.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

# Console bytes -> lines of a CRI container log. No I/O.
#
# A log line is `<RFC 3339 time, nine fraction digits> <stdout|stderr> <F|P> <content>`. F ends a line of the guest; P
# is a piece that the next line of the stream continues, so that glueing the contents of the P lines to the F line
# after them gives the guest's line. Everything a console shows is stdout; a command has both. Bytes are kept as they
# are, except the newline and one carriage return before it.

MAX_CONTENT: Final = 16 * 1024


def timestamp(nanoseconds: int) -> bytes:
    """Of fixed length, so that lines written again after a crash take as much room as before."""
    seconds, fraction = divmod(nanoseconds, 1_000_000_000)
    return b"%04d-%02d-%02dT%02d:%02d:%02d.%09dZ" % (*time.gmtime(seconds)[:6], fraction)


class LineCutter:
    """Holds back what may still become part of a line. What comes out depends on the bytes and the calls of `flush`, not
    on how the bytes were cut into pieces by `feed`."""

    __slots__ = ("_held", "_stream")

    def __init__(self, stream: str = "stdout") -> None:
        self._held = b""
        self._stream = stream.encode()

    @property
    def held(self) -> int:
        """Bytes fed but not given out: at most MAX_CONTENT + 1."""
        return len(self._held)

    @property
    def can_flush(self) -> bool:
        return self._held not in (b"", b"\r")

    def feed(self, data: bytes, stamp: bytes) -> bytes:
        """The log lines that `data` completes."""
        text = self._held + data
        end = text.rfind(b"\n") + 1
        lines = _full(text[:end], stamp, self._stream) if end else b""
        pieces: list[bytes] = []
        self._held = text[end:]
        while _must_split(self._held):
            pieces.append(self._held[:MAX_CONTENT])
            self._held = self._held[MAX_CONTENT:]
        return lines + _partial(pieces, stamp, self._stream)

    def flush(self, stamp: bytes) -> bytes:
        """The unfinished line as P; a carriage return at its end is held, for a newline may follow."""
        ready = self._held.removesuffix(b"\r")
        self._held = self._held[len(ready) :]
        return _partial([ready] if ready else [], stamp, self._stream)

    def end(self, stamp: bytes) -> bytes:
        """Everything held, as P: nothing will follow."""
        rest, self._held = self._held, b""
        return _partial(_pieces(rest), stamp, self._stream)


def lines_of(stream: str, text: bytes, stamp: bytes) -> bytes:
    """The log lines of this piece alone: an unfinished line at its end is P."""
    cutter = LineCutter(stream)
    return cutter.feed(text, stamp) + cutter.end(stamp)


def own_line(text: str, stamp: bytes, *, after: bytes) -> bytes:
    """A line of virtshim's own, on stderr. `after`: the log line before it. If that is unfinished, an empty line comes between:
    readers that put the contents of all lines together would show the two as one."""
    before = b"\n" if _is_unfinished(after) else b""
    return lines_of("stderr", before + text.encode(errors="replace").replace(b"\n", b" ") + b"\n", stamp)


def last_line(text: bytes) -> bytes:
    """Of whole log lines; b"" if there are none."""
    return text[text.rfind(b"\n", 0, -1) + 1 :]


def _is_unfinished(line: bytes) -> bool:
    return line.split(b" ", 3)[2:3] == [b"P"]


def _must_split(text: bytes) -> bool:
    """A carriage return just beyond the limit may be the one before a newline, which does not count."""
    return len(text) > MAX_CONTENT + 1 or (len(text) == MAX_CONTENT + 1 and not text.endswith(b"\r"))


def _pieces(text: bytes) -> Iterator[bytes]:
    return (text[start : start + MAX_CONTENT] for start in range(0, len(text), MAX_CONTENT))


def _partial(pieces: Iterable[bytes], stamp: bytes, stream: bytes) -> bytes:
    return b"".join(b"%b %b P %b\n" % (stamp, stream, piece) for piece in pieces)


def _full(text: bytes, stamp: bytes, stream: bytes) -> bytes:
    """`text` ends with a newline."""
    contents = text.replace(b"\r\n", b"\n").split(b"\n")
    contents.pop()
    if max(map(len, contents)) > MAX_CONTENT:
        return b"".join(_long(content, stamp, stream) for content in contents)
    # Floods come this way: no work per line in Python.
    head = b"%b %b F " % (stamp, stream)
    return head + (b"\n" + head).join(contents) + b"\n"


def _long(content: bytes, stamp: bytes, stream: bytes) -> bytes:
    pieces = list(_pieces(content)) or [b""]
    return _partial(pieces[:-1], stamp, stream) + b"%b %b F %b\n" % (stamp, stream, pieces[-1])


# One fixed length: the record is overwritten in place, by one write that a kill cannot cut in two.
ENCODED_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Position:
    """`raw_inode` 0: the console has not said anything yet."""

    offset: int = 0
    raw_inode: int = 0
    log_device: int = 0
    log_inode: int = 0
    log_size: int = 0


def encode(position: Position) -> bytes:
    text = json.dumps(dataclasses.asdict(position), separators=(",", ":"))
    return text.ljust(ENCODED_BYTES - 1).encode() + b"\n"


def decode(record: bytes) -> Position | None:
    """None for anything that `encode` did not make."""
    try:
        fields = json.loads(record)
        position = Position(**fields)
    except (ValueError, TypeError, RecursionError):
        return None
    values = dataclasses.astuple(position)
    return position if all(type(value) is int and value >= 0 for value in values) else None
