"""`virtshim logs` prints a VM's CRI log: its serial console, or the output of its command."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from typing import Final

from virtshim.cli.vm_lookup import vm_of
from virtshim.cri.client import connected
from virtshim.model.errors import InvalidRequest, ShimError, WrongState
from virtshim.system.files import open_regular

# Seconds between two reads of a followed log.
_LOOK: Final = 0.2
_READ: Final = 1 << 16
# Longer lines do not occur in a CRI log.
_LONGEST: Final = 1 << 20
# More lines than any log can have.
_MOST: Final = 1 << 40
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class LogOptions:
    """`since`: the text of --since. `tail`: number of last lines to print, -1 for all."""

    follow: bool = False
    since: str = ""
    tail: int = -1
    timestamps: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a CRI log. A `partial` line continues in the next one."""

    stamp: str
    stream: str
    partial: bool
    text: bytes


def logs(socket: str, wanted: str, options: LogOptions) -> None:
    """Raises ShimError, BrokenPipeError."""
    since = parse_since(options.since, time.time())
    with connected(socket) as node:
        vm = vm_of(wanted, node.pods(), node.vms())
        path = node.how_is(vm.id).log
        if not path:
            raise WrongState(
                f"{vm.name} ({vm.id[:12]}) was created without a log; use `virtshim console` to see its console"
            )

        def is_over() -> bool:
            try:
                return node.how_is(vm.id).is_over
            except ShimError:  # the VM is removed, or virtshim is down: the log may still be there
                return not os.path.exists(path)

        _print(path, since, options, is_over)


def parse_since(text: str, now: float) -> str:
    """A time stamp in the log's format; "" for the whole log. `text`: a time ago (10m), or RFC 3339. Raises InvalidRequest."""
    if not text:
        return ""
    try:
        if found := _AGO.fullmatch(text):
            at = datetime.fromtimestamp(now - float(found[1]) * _SECONDS[found[2]], tz=UTC)
        else:
            at = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError, OSError) as exc:
        raise InvalidRequest(
            f"--since {text[:80]!r}: must be a time ago, such as 90s, 10m, 2h, 1d, or 2026-01-31T12:00:00Z"
        ) from exc
    return at.strftime("%Y-%m-%dT%H:%M:%S.%f")


def _print(path: str, since: str, options: LogOptions, is_over: Callable[[], bool]) -> None:
    with contextlib.closing(Log(path)) as log:
        found: Iterable[Line] = (line for line in log.written() if line.stamp >= since)
        if options.tail >= 0:
            found = last(found, options.tail)
        for line in found:
            _put(line, timestamps=options.timestamps)
        sys.stdout.buffer.flush()
        if options.follow:
            for line in log.followed(is_over):
                _put(line, timestamps=options.timestamps)
                sys.stdout.buffer.flush()


def last(found: Iterable[Line], count: int) -> Iterator[Line]:
    """The pieces of the last `count` whole lines."""
    kept: deque[list[Line]] = deque([[]], maxlen=min(count, _MOST) + 1)
    for line in found:
        kept[-1].append(line)
        if not line.partial:
            kept.append([])
    pieces = [one for one in kept if one]
    for one in pieces[-count:] if count else ():
        yield from one


class Lines:
    """Parses the lines of a CRI log from chunks of any size. Skips what is not a CRI log line."""

    def __init__(self) -> None:
        self._rest = b""

    def lines(self, data: bytes) -> Iterator[Line]:
        """The lines that end in `data`."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            self._rest = b""
        for raw in whole:
            stamp, _, after = raw.partition(b" ")
            stream, _, after = after.partition(b" ")
            tag, _, text = after.partition(b" ")
            if tag[:1] in (b"F", b"P"):
                yield Line(stamp.decode(errors="replace"), stream.decode(errors="replace"), tag[:1] == b"P", text)


class Log:
    """A log that is read from its beginning, each line once. Continues with the new file after a rotation. Raises WrongState."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = _opened(path)
        self._lines = Lines()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def written(self) -> Iterator[Line]:
        """The lines that are complete so far."""
        while self._file is not None and (data := self._file.read(_READ)):
            yield from self._lines.lines(data)

    def followed(self, is_over: Callable[[], bool]) -> Iterator[Line]:
        """New lines, also after a rotation, until the VM has ended and every line is read."""
        pause = threading.Event()
        while True:
            over = is_over()  # checked before the last read
            yield from self.written()
            if self._file is None or self.is_replaced(self._file):
                yield from self.written()  # lines that came just before the rotation
                self.close()
                self._file, self._lines = _opened(self._path), Lines()
                if self._file is not None:
                    continue
            if over:
                return
            pause.wait(_LOOK)

    def is_replaced(self, file: FileIO) -> bool:
        """Whether the path now leads to a different file."""
        try:
            return not os.path.samestat(os.lstat(self._path), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False


def _opened(path: str) -> FileIO | None:
    """The open log; None if it does not exist. This process is root, and a pod may be able to write to the directory."""
    try:
        return open_regular(path)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise WrongState(f"the log {path} cannot be read: {exc.strerror}; it must be a regular file") from exc


def _put(line: Line, *, timestamps: bool) -> None:
    stamp = f"{line.stamp} ".encode() if timestamps else b""
    out = sys.stderr.buffer if line.stream == "stderr" else sys.stdout.buffer
    out.write(stamp + line.text + (b"" if line.partial else b"\n"))
