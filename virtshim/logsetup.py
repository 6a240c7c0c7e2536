"""Logging: structlog events to standard error, as text for people or as JSON lines for collectors."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def set_up_logging(level: str, form: str) -> None:
    """`form` is auto, text or json; auto is text on a terminal. Standard library loggers come out the same way.

    Tracebacks come without local variables, which structlog would show: passwords and pods' data are among them."""
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: Any
    if form == "text":
        render = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
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
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=render, foreign_pre_chain=shared))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("grpc._common").addFilter(_in_one_line)
    for chatty in ("urllib3", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _in_one_line(record: logging.LogRecord) -> bool:
    """A request that is no protobuf is its client's fault; grpc logs where in its own code it saw that."""
    if record.exc_info:
        reason = " ".join(str(record.exc_info[1]).split())
        record.msg, record.args, record.exc_info = f"{record.getMessage()} {reason}", None, None
    return True
