"""The log: each record is one short line of printable text, and only root can fill the log.

Names, addresses and errors come from pods, CNI plugins and peers. A line break in them would let them forge a log line.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

# Most characters of one line. Tracebacks are not cut, because their text is tapmanager's own.
_LONGEST = 1000


# `virtshim up` sets this variable to a file in which the program also keeps its log.
FILE_VARIABLE = "UP_LOG_FILE"
_FILE_BYTES = 8 << 20  # the same amount again in FILE.1, the previous file


def set_up(level: str) -> None:
    """Sends all logs of this process to standard error, in such lines."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if path := os.environ.get(FILE_VARIABLE):
        handlers.append(log_file(path))
    root = logging.getLogger()
    root.handlers[:] = handlers
    for handler in handlers:
        handler.setFormatter(OneLine())
    root.setLevel(level.upper())


def log_file(path: str) -> logging.Handler:
    """Writes to a log file. On a full disk its lines are lost, without other effects."""
    from logging.handlers import RotatingFileHandler  # loaded late, because it takes memory and a service of systemd
    # does not need it

    class LogFile(RotatingFileHandler):
        def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the base class's name
            del record

    return LogFile(path, maxBytes=_FILE_BYTES, backupCount=1)


def one_line(text: str) -> str:
    """Escapes characters that are not printable, above all line breaks, and cuts long text."""
    cut = text[:_LONGEST]
    shown = cut if cut.isprintable() else "".join(char if char.isprintable() else _escaped(char) for char in cut)
    return shown if len(text) <= _LONGEST else f"{shown} ... ({len(text)} characters)"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "replace").decode("ascii")


class OneLine(logging.Formatter):
    """Time, level and message, with the lines of a traceback indented below."""

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
        """Returns None if the user's line must not be logged. Otherwise, how many of the user's lines were dropped since the last
        logged one."""
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
