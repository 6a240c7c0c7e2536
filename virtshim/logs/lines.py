"""Lines of CRI logs, and the position up to which a console was copied to its log, which outlives restarts. No I/O.

The log's first `log_size` bytes hold the raw bytes before `offset`, except those that were dropped because there were
too many, and nothing else. A process that dies between writing the log and saving the position leaves further bytes in
the log. The next process writes these again.
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
    """An RFC 3339 time of fixed length, so that lines that are written again after a crash have the same length."""
    seconds, fraction = divmod(nanoseconds, 1_000_000_000)
    return b"%04d-%02d-%02dT%02d:%02d:%02d.%09dZ" % (*time.gmtime(seconds)[:6], fraction)


class LineCutter:
    """Makes log lines of a console's bytes, and holds an unfinished line back. The lines depend only on the bytes and
    on the calls of `flush`, not on how the bytes are split over calls of `feed`."""

    __slots__ = ("_held", "_stream")

    def __init__(self, stream: str = "stdout") -> None:
        self._held = b""
        self._stream = stream.encode()

    @property
    def held(self) -> int:
        """The number of bytes that are held back, at most MAX_CONTENT + 1."""
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
        """The unfinished line, with the tag P. Keeps a carriage return at its end, because a newline may follow."""
        ready = self._held.removesuffix(b"\r")
        self._held = self._held[len(ready) :]
        return _partial([ready] if ready else [], stamp, self._stream)

    def end(self, stamp: bytes) -> bytes:
        """Everything that is held back, with the tag P, because nothing will follow."""
        rest, self._held = self._held, b""
        return _partial(_pieces(rest), stamp, self._stream)


def lines_of(stream: str, text: bytes, stamp: bytes) -> bytes:
    """The log lines of this piece alone. An unfinished line at its end gets the tag P."""
    cutter = LineCutter(stream)
    return cutter.feed(text, stamp) + cutter.end(stamp)


def own_line(text: str, stamp: bytes, *, after: bytes) -> bytes:
    """A line of virtshim's own, on stderr. `after`: the log line before it. If that line is unfinished, an empty line
    comes first. Otherwise readers that join the contents of lines would show the two as one."""
    before = b"\n" if _is_unfinished(after) else b""
    return lines_of("stderr", before + text.encode(errors="replace").replace(b"\n", b" ") + b"\n", stamp)


def last_line(text: bytes) -> bytes:
    """The last of the complete log lines in `text`; b"" if there are none."""
    return text[text.rfind(b"\n", 0, -1) + 1 :]


def _is_unfinished(line: bytes) -> bool:
    return line.split(b" ", 3)[2:3] == [b"P"]


def _must_split(text: bytes) -> bool:
    """Whether the text is longer than one line may be. A carriage return directly after the limit does not count,
    because a newline may follow it."""
    return len(text) > MAX_CONTENT + 1 or (len(text) == MAX_CONTENT + 1 and not text.endswith(b"\r"))


def _pieces(text: bytes) -> Iterator[bytes]:
    return (text[start : start + MAX_CONTENT] for start in range(0, len(text), MAX_CONTENT))


def _partial(pieces: Iterable[bytes], stamp: bytes, stream: bytes) -> bytes:
    return b"".join(b"%b %b P %b\n" % (stamp, stream, piece) for piece in pieces)


def _full(text: bytes, stamp: bytes, stream: bytes) -> bytes:
    """The log lines of complete lines. `text` ends with a newline."""
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


# The record has a fixed length, so that one write, which a kill cannot split, overwrites it in place.
ENCODED_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Position:
    """`raw_inode`: 0 if the console has not printed anything yet."""

    offset: int = 0
    raw_inode: int = 0
    log_device: int = 0
    log_inode: int = 0
    log_size: int = 0


def encode(position: Position) -> bytes:
    text = json.dumps(dataclasses.asdict(position), separators=(",", ":"))
    return text.ljust(ENCODED_BYTES - 1).encode() + b"\n"


def decode(record: bytes) -> Position | None:
    """The position in the record; None for bytes that `encode` did not make."""
    try:
        fields = json.loads(record)
        position = Position(**fields)
    except (ValueError, TypeError, RecursionError):
        return None
    values = dataclasses.astuple(position)
    return position if all(type(value) is int and value >= 0 for value in values) else None
