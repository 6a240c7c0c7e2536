"""What reaches the log: each record is one short line of printable text, and nobody but root can fill the log.

Names, addresses and errors come from pods, CNI plugins and peers. A line break among them would be a line that nobody has logged.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

# Characters of one line; tracebacks are ours and stay whole.
_LONGEST = 1000


# `virtshim up` names a file here, which each of its programs keeps its log in as well.
FILE_VARIABLE = "UP_LOG_FILE"
_FILE_BYTES = 8 << 20  # and as much once more in FILE.1, the one before


def set_up(level: str) -> None:
    """Everything that is logged in this process goes to standard error, in such lines."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if path := os.environ.get(FILE_VARIABLE):
        handlers.append(LogFile(path))
    root = logging.getLogger()
    root.handlers[:] = handlers
    for handler in handlers:
        handler.setFormatter(OneLine())
    root.setLevel(level.upper())


class LogFile(logging.handlers.RotatingFileHandler):
    """A full disk costs its lines, and nothing else."""

    def __init__(self, path: str) -> None:
        super().__init__(path, maxBytes=_FILE_BYTES, backupCount=1)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the base class's name
        del record


def one_line(text: str, longest: int = _LONGEST) -> str:
    """Escapes what is not printable, line breaks above all, and cuts."""
    cut = text[:longest]
    shown = cut if cut.isprintable() else "".join(char if char.isprintable() else _escaped(char) for char in cut)
    return shown if len(text) <= longest else f"{shown} ... ({len(text)} characters)"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "replace").decode("ascii")


class OneLine(logging.Formatter):
    """Time, level and message; a traceback's lines stand below it, indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the base class's name
        return one_line(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802
        lines = super().formatException(ei).splitlines()  # type: ignore[arg-type]  # its type is private
        return "\n".join(f"    {one_line(line)}" for line in lines)


@dataclass(slots=True)
class _Allowance:
    left: float
    at: float
    unlogged: int = 0


class LineLimit:
    """For each key, `burst` lines at once and one each `every` seconds after that. Thread-safe."""

    def __init__(self, burst: float, every: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._every = every
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._allowances: dict[Hashable, _Allowance] = {}

    def unlogged(self, key: Hashable) -> int | None:
        """None: this line is not to be logged. Otherwise how many of that key's were not since the last that was."""
        now = self._monotonic()
        with self._lock:
            found = self._allowances.setdefault(key, _Allowance(self._burst, now))
            found.left = min(self._burst, found.left + (now - found.at) / self._every)
            found.at = now
            if found.left < 1:
                found.unlogged += 1
                return None
            found.left -= 1
            unlogged, found.unlogged = found.unlogged, 0
            return unlogged
