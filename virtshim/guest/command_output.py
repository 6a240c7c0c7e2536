"""Reads a command's ports: output, exit code, and why it could not start. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from virtshim.model.errors import InternalError, InvalidRequest, ShimError, WrongState
from virtshim.model.text import printable_text
from virtshim.streaming.ports import Output, OutStream

# One port's bytes, as the run script writes them (see `exec_scripts`): data with records in between.

# A record is the token, a space, the words and a semicolon. The longest value is a directory's name.
MAX_RECORD = 4300
# The most bytes that earlier sessions may have left in the port.
_MAX_STALE = 4 << 20
# The run script writes at most three records.
MAX_RECORDS = 16
MAX_AFTER_END = 64 << 10


class BadStream(Exception):
    """The guest breaks the format."""


@dataclass(frozen=True, slots=True)
class Record:
    word: str
    value: str = ""


class SessionStream:
    """Takes raw bytes, and returns data and records in order. Data before the `start` record and after `end` is thrown
    away. The token is random, so that no output contains it by accident. A command that prints it on purpose only
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
        """Moves the first `count` bytes to `out`, or drops them before the start record."""
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
        """How many bytes at the end may be the beginning of a mark."""
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


_CODE = re.compile(r"[0-9]{1,3}")
_CODE_MOST = 255


class CommandOutput:
    def __init__(self, token: str, *, stderr: bool) -> None:
        wanted = (OutStream.STDOUT, OutStream.STDERR) if stderr else (OutStream.STDOUT,)
        self._streams = {stream: SessionStream(token) for stream in wanted}
        self.code: int | None = None
        self.tty = ""

    def feed(self, stream: OutStream, data: bytes) -> list[Output]:
        """The output in these bytes. Raises a ShimError with the guest's reason if the command could not start, or
        InternalError if the guest breaks the format."""
        out: list[Output] = []
        try:
            for item in self._streams[stream].feed(data):
                if isinstance(item, Record):
                    self._note(item)
                else:
                    out.append(Output(stream, item))
        except BadStream as exc:
            raise InternalError(f"the guest breaks the exec protocol: {exc}") from exc
        return out

    @property
    def started(self) -> bool:
        return all(stream.started for stream in self._streams.values())

    @property
    def exited(self) -> bool:
        """Whether the command itself has ended. Other processes may still hold its streams open."""
        return self.code is not None

    @property
    def complete(self) -> bool:
        return self.exited and all(stream.ended for stream in self._streams.values())

    def _note(self, record: Record) -> None:
        match record.word:
            case "exit":
                if not _CODE.fullmatch(record.value) or int(record.value) > _CODE_MOST:
                    raise BadStream("an exit code that is not one")
                self.code = int(record.value)
            case "fail":
                raise failure(record.value)
            case "tty":
                self.tty = record.value if record.value.startswith("/dev/") and record.value.isprintable() else ""
            case _:
                pass  # the stream handles start and end


def failure(words: str) -> ShimError:
    """The error for the reason why a script could not start the command. `words`: WORD VALUE."""
    what, _, value = words.partition(" ")
    shown = printable_text(value[:200])
    match what:
        case "directory":
            return InvalidRequest(f"the guest has no working directory {shown}; correct workingDir or the image")
        case "user":
            return InvalidRequest(f"the guest's /etc/passwd has no user {shown}; correct runAsUser or the image")
        case "tool":
            return WrongState(
                f"the guest has no program `{shown}` for this; {_REMEDY.get(shown, 'install it in the image')}"
            )
        case _:
            return InternalError("the guest could not start the command and gave no reason")


_REMEDY = {
    "setpriv": "to run commands as this user and groups install util-linux (Alpine: setpriv), coreutils or python3 in the image",
    "script": "for a terminal install util-linux's script, or python3, in the image",
    "unshare": "for readOnlyRootFilesystem install util-linux or busybox in the image",
    "setsid": "install util-linux or busybox in the image",
}
