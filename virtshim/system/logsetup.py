"""Logging: structlog events to standard error, as text for people, or JSON lines for collectors, or to systemd's journal.

Names, paths and errors in fields come from pods, guests, images and servers. This makes them short and printable, so that nobody
can forge a line, and limits warnings, so that nobody can fill the log.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

import structlog

from tapmanager.log_lines import FILE_VARIABLE, LineLimit, log_file
from virtshim.model.text import escaped

# The journal's own protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL): each field of an event is a field of the entry.
JOURNAL_SOCKET: Final = "/run/systemd/journal/socket"
# The prefix of events' own fields, because all programs share the journal's names.
_PREFIX: Final = "VIRTSHIM_"
_NOT_IN_NAMES: Final = re.compile(r"[^A-Z0-9_]")
_PRIORITIES: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_STANDARD_KEYS: Final = frozenset({"event", "level", "timestamp"})


def stderr_is_journal(
    environ: Mapping[str, str] = os.environ, descriptor: int = 2, socket: str = JOURNAL_SOCKET
) -> bool:
    """Whether systemd has connected standard error to the journal."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}" and os.path.exists(socket)


class JournalHandler(logging.Handler):
    """`line`: formats a record for people. `otherwise`: gets the records that the journal does not accept."""

    def __init__(self, line: logging.Formatter, otherwise: logging.Handler, path: str = JOURNAL_SOCKET) -> None:
        super().__init__()
        self.setFormatter(line)
        self._otherwise = otherwise
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def close(self) -> None:
        self._socket.close()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        # A copy, because formatters take the event apart and the next one needs it whole.
        event = dict(record.msg) if isinstance(record.msg, dict) else {}
        try:
            message = self.format(record)
            self._socket.sendto(journal_entry(message, record.levelno, event), socket.MSG_NOSIGNAL, self._path)
        except (OSError, ValueError):  # too long, or the journal is being restarted
            self._otherwise.handle(record)
        except Exception:  # noqa: BLE001  as logging's own handlers: a bad log line must not break its caller
            self.handleError(record)


def journal_entry(message: str, level: int, event: Mapping[str, Any]) -> bytes:
    """One of the protocol's messages. Values look as in the log. Pure."""
    fields = {
        "MESSAGE": message,
        "PRIORITY": str(_PRIORITIES.get(level, 6)),
        "SYSLOG_IDENTIFIER": "virtshim",
        f"{_PREFIX}EVENT": str(event.get("event", "")),
    }
    for key, value in event.items():
        if key not in _STANDARD_KEYS and not key.startswith("_") and key != "exc_info" and value is not None:
            fields[_PREFIX + _NOT_IN_NAMES.sub("_", str(key).upper())[:50]] = str(value)
    return b"".join(_field(name, value.encode(errors="backslashreplace")) for name, value in fields.items() if value)


def _field(name: str, value: bytes) -> bytes:
    if b"\n" not in value:
        return name.encode() + b"=" + value + b"\n"
    return name.encode() + b"\n" + len(value).to_bytes(8, "little") + value + b"\n"


# The most characters of a value, and entries of a list: an error may quote a kernel's or a plugin's whole answer.
_LONGEST = 2000
_MOST_ENTRIES = 100
_DEEPEST = 5

# Warnings and errors of one name: the most at once, and then per second.
_BURST = 100
_RATE = 2.0


def set_up_logging(
    level: str, form: str, journal_socket: str = JOURNAL_SOCKET, monotonic: Callable[[], float] = time.monotonic
) -> None:
    """`form`: auto, text, json or journal. auto is text on a terminal, the journal if standard error is connected to it,
    otherwise json. Standard library loggers do the same. `monotonic`: the clock for the limit of warnings.

    Tracebacks omit local variables, which structlog would show: they may contain passwords and pods' data."""
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "journal" if stderr_is_journal() else "json"
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        _shorten_values,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: Any
    if form in ("text", "journal"):
        render = structlog.dev.ConsoleRenderer(colors=_in_colour(), exception_formatter=_indented_traceback)
    else:
        without_locals = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        shared.append(structlog.processors.ExceptionRenderer(without_locals))
        render = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=render, foreign_pre_chain=shared))
    if form == "journal":
        handler = JournalHandler(handler.formatter or logging.Formatter(), handler, journal_socket)
    handler.addFilter(_Flood(monotonic))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    if path := os.environ.get(FILE_VARIABLE):
        root.addHandler(_file(path, shared))
    set_log_level(level)
    logging.getLogger("grpc._common").addFilter(_in_one_line)
    for chatty in ("urllib3", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # opentelemetry logs each failed attempt; virtshim.metrics logs such trouble once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def _in_colour() -> bool:
    return sys.stderr.isatty() or bool(os.environ.get("FORCE_COLOR"))


def set_log_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


def _file(path: str, shared: list[Any]) -> logging.Handler:
    """Writes JSON lines, whatever form standard error has."""
    without_locals = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    lines = structlog.stdlib.ProcessorFormatter(
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.ExceptionRenderer(without_locals),
            structlog.processors.JSONRenderer(),
        ],
        foreign_pre_chain=shared,
    )
    handler = log_file(path)
    handler.setFormatter(lines)
    handler.addFilter(_Flood())
    return handler


def _shorten_values(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor that makes every value short and printable."""
    for key, value in event.items():
        if key not in ("exc_info", "_record", "_from_structlog"):
            event[key] = _plain(value, _DEEPEST)
    return event


def _plain(value: Any, deep: int) -> Any:
    """Keeps numbers, flags and None."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return escaped(value, _LONGEST)
        case dict() if deep:
            shown = {escaped(str(key), _LONGEST): _plain(item, deep - 1) for key, item in _few(value.items())}
            return shown if len(value) <= _MOST_ENTRIES else {**shown, "...": f"{len(value)} in all"}
        case list() | tuple() | set() | frozenset() if deep:
            items = [_plain(item, deep - 1) for item in _few(value)]
            return items if len(value) <= _MOST_ENTRIES else [*items, f"... {len(value)} in all"]
        case _ if hasattr(value, "DESCRIPTOR"):  # CRI messages may contain registry logins and pods' variables
            return f"<{type(value).__name__}>"
        case _:
            return escaped(str(value), _LONGEST)


def _few(values: Any) -> list[Any]:
    return [value for _, value in zip(range(_MOST_ENTRIES), values, strict=False)]


def _indented_traceback(out: Any, exc_info: Any) -> None:
    """Indents a traceback, so that none of its lines looks like an event."""
    text = structlog.processors.format_exc_info(None, "", {"exc_info": exc_info}).get("exception", "")
    out.write("\n" + "\n".join(f"    {escaped(line, _LONGEST)}" for line in text.splitlines()))


class _Flood(logging.Filter):
    """Limits warnings of one name. The next warning that passes says how many were dropped."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._lines = LineLimit(_BURST, 1 / _RATE, monotonic)

    def filter(self, record: logging.LogRecord) -> bool:
        """False drops the record."""
        if record.levelno < logging.WARNING:
            return True
        unlogged = self._lines.unlogged(str(record.msg.get("event")) if isinstance(record.msg, dict) else record.name)
        if unlogged and isinstance(record.msg, dict):
            record.msg["unlogged"] = unlogged
        return unlogged is not None


def _in_one_line(record: logging.LogRecord) -> bool:
    """Shortens grpc's traceback for a request that is not protobuf, because that is the client's fault."""
    if record.exc_info:
        reason = " ".join(str(record.exc_info[1]).split())
        record.msg, record.args, record.exc_info = f"{record.getMessage()} {reason}", None, None
    return True
