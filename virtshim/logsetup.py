"""Logging: structlog events to standard error, as text for people or as JSON lines for collectors.

Names, paths and errors in fields come from pods, guests, images and servers. Here, for all events, they become short and
printable, so that a line is what somebody here has logged, and whoever causes warnings without end fills no log.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from tapmanager.log_lines import FILE_VARIABLE, LogFile
from virtshim import journal
from virtshim.domain.printable import escaped

# Characters of one value, and entries of one list: an error may quote a kernel's or a plugin's whole answer.
_LONGEST = 2000
_MOST_ENTRIES = 100
_DEEPEST = 5

# Warnings and errors of one name: so many at once, and so many a second after that.
_BURST = 100
_RATE = 2.0


def set_up_logging(
    level: str, form: str, journal_socket: str = journal.SOCKET, monotonic: Callable[[], float] = time.monotonic
) -> None:
    """`form` is auto, text, json or journal; auto is text on a terminal, the journal where systemd has joined it, else json.
    Standard library loggers come out the same way. `monotonic` is the clock of the bound on warnings.

    Tracebacks come without local variables, which structlog would show: passwords and pods' data are among them."""
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "journal" if journal.is_our_stderr() else "json"
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        _of_others,
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
        handler = journal.JournalHandler(handler.formatter or logging.Formatter(), handler, journal_socket)
    handler.addFilter(_Flood(monotonic))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    if path := os.environ.get(FILE_VARIABLE):
        root.addHandler(_file(path, shared))
    set_log_level(level)
    logging.getLogger("grpc._common").addFilter(_in_one_line)
    for chatty in ("urllib3", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # It tells each attempt that failed; virtshim.telemetry tells such trouble once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def _in_colour() -> bool:
    return sys.stderr.isatty() or bool(os.environ.get("FORCE_COLOR"))


def set_log_level(level: str) -> None:
    """From now on, of all that is logged here."""
    logging.getLogger().setLevel(level.upper())


def _file(path: str, shared: list[Any]) -> logging.Handler:
    """JSON lines, whatever standard error has."""
    without_locals = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    lines = structlog.stdlib.ProcessorFormatter(
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.ExceptionRenderer(without_locals),
            structlog.processors.JSONRenderer(),
        ],
        foreign_pre_chain=shared,
    )
    handler = LogFile(path)
    handler.setFormatter(lines)
    handler.addFilter(_Flood())
    return handler


def _of_others(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor: every value is short and printable."""
    for key, value in event.items():
        if key not in ("exc_info", "_record", "_from_structlog"):
            event[key] = _plain(value, _DEEPEST)
    return event


def _plain(value: Any, deep: int) -> Any:
    """Numbers, flags and nothing stay what they are."""
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
        case _ if hasattr(value, "DESCRIPTOR"):  # a message of CRI's may hold registry logins and pods' variables
            return f"<{type(value).__name__}>"
        case _:
            return escaped(str(value), _LONGEST)


def _few(values: Any) -> list[Any]:
    return [value for _, value in zip(range(_MOST_ENTRIES), values, strict=False)]


def _indented_traceback(out: Any, exc_info: Any) -> None:
    """No line of it looks like an event of its own."""
    text = structlog.processors.format_exc_info(None, "", {"exc_info": exc_info}).get("exception", "")
    out.write("\n" + "\n".join(f"    {escaped(line, _LONGEST)}" for line in text.splitlines()))


class _Flood(logging.Filter):
    """Cuts off more warnings of one name than anybody reads; the next one that passes says how many there were."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._lock = threading.Lock()
        # event, or library -> how many may pass, since when, how many did not
        self._events: dict[str, tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a record that is not to be logged."""
        if record.levelno < logging.WARNING:
            return True
        event = str(record.msg.get("event")) if isinstance(record.msg, dict) else record.name
        now = self._monotonic()
        with self._lock:
            left, since, unlogged = self._events.get(event, (float(_BURST), now, 0))
            left = min(float(_BURST), left + (now - since) * _RATE)
            passes = left >= 1
            self._events[event] = (left - 1, now, 0) if passes else (left, now, unlogged + 1)
        if passes and unlogged and isinstance(record.msg, dict):
            record.msg["unlogged"] = unlogged
        return passes


def _in_one_line(record: logging.LogRecord) -> bool:
    """A request that is no protobuf is its client's fault; grpc logs where in its own code it saw that."""
    if record.exc_info:
        reason = " ".join(str(record.exc_info[1]).split())
        record.msg, record.args, record.exc_info = f"{record.getMessage()} {reason}", None, None
    return True
