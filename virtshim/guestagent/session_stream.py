"""One port's bytes, as the run script writes them (see `exec_scripts`): data with records between. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Token, a space, the words, a semicolon. A directory's name is the longest value.
MAX_RECORD = 4300
# What an earlier session may have left in the port.
_MAX_STALE = 4 << 20
# The run script writes three records at most, and nothing after the last.
MAX_RECORDS = 16
MAX_AFTER_END = 64 << 10


class BadStream(Exception):
    """The guest does not keep to the form."""


@dataclass(frozen=True, slots=True)
class Record:
    word: str
    value: str = ""


class SessionStream:
    """Takes raw bytes, gives data and records in their order. What came before the `start` record is thrown away, and so is
    what comes after `end`. The token is random: no output holds it by accident; a command that prints it on purpose only
    spoils its own output."""

    def __init__(self, token: str) -> None:
        self._mark = b"\1" + token.encode() + b" "
        self._held = bytearray()
        self._stale = 0
        self._records = 0
        self._after_end = 0
        self.started = False
        self.ended = False

    def feed(self, piece: bytes) -> list[bytes | Record]:
        """Raises BadStream."""
        out: list[bytes | Record] = []
        if self.ended:
            self._after_end += len(piece)
            if self._after_end > MAX_AFTER_END:
                raise BadStream("it keeps sending data after the end")
            return out
        self._held += piece
        while not self.ended:
            at = self._held.find(self._mark)
            if at < 0:
                self._emit(out, len(self._held) - self._partial())
                break
            self._emit(out, at)
            end = self._held.find(b";", len(self._mark))
            if end < 0:
                if len(self._held) > MAX_RECORD:
                    raise BadStream("a record without end")
                break
            record = _record(bytes(self._held[len(self._mark) : end]))
            del self._held[: end + 1]
            self._records += 1
            if self._records > MAX_RECORDS:
                raise BadStream("it keeps sending records")
            self.started = self.started or record.word == "start"
            self.ended = record.word == "end"
            out.append(record)
        if self.ended:
            self._held.clear()
        return out

    def _emit(self, out: list[bytes | Record], count: int) -> None:
        """Data up to there, if any."""
        if not count:
            return
        if self.started:
            out.append(bytes(self._held[:count]))
        else:
            self._stale += count
            if self._stale > _MAX_STALE:
                raise BadStream("it keeps sending unexpected data")
        del self._held[:count]

    def _partial(self) -> int:
        """How many bytes at the end may be the beginning of the mark."""
        for size in range(min(len(self._mark) - 1, len(self._held)), 0, -1):
            if self._mark.startswith(self._held[-size:]):
                return size
        return 0


_WORD = re.compile(r"[a-z]{1,16}")


def _record(raw: bytes) -> Record:
    word, _, value = raw.decode(errors="replace").partition(" ")
    if not _WORD.fullmatch(word):
        raise BadStream("a record without a word")
    return Record(word, value)
