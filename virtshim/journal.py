"""systemd's journal, by its own protocol: each field of an event is a field of the entry (systemd.io/JOURNAL_NATIVE_PROTOCOL)."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping
from typing import Any, Final

SOCKET: Final = "/run/systemd/journal/socket"
# An event's own fields are below it: the journal's names are everybody's.
_PREFIX: Final = "VIRTSHIM_"
_NOT_IN_NAMES: Final = re.compile(r"[^A-Z0-9_]")
_PRIORITIES: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_TOLD_OTHERWISE: Final = frozenset({"event", "level", "timestamp"})


def is_our_stderr(environ: Mapping[str, str] = os.environ, descriptor: int = 2, socket: str = SOCKET) -> bool:
    """Whether systemd has joined standard error to the journal."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}" and os.path.exists(socket)


class JournalHandler(logging.Handler):
    """`line` makes the text that people read of a record. What the journal does not take goes to `otherwise`."""

    def __init__(self, line: logging.Formatter, otherwise: logging.Handler, path: str = SOCKET) -> None:
        super().__init__()
        self.setFormatter(line)
        self._otherwise = otherwise
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def close(self) -> None:
        self._socket.close()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        # A formatter that takes the event apart leaves it whole for the next: it works on a copy.
        event = dict(record.msg) if isinstance(record.msg, dict) else {}
        try:
            message = self.format(record)
            self._socket.sendto(entry(message, record.levelno, event), socket.MSG_NOSIGNAL, self._path)
        except (OSError, ValueError):  # too long, or the journal is being restarted
            self._otherwise.handle(record)
        except Exception:  # noqa: BLE001  as logging's own handlers: a library's mistake in a log line is not its caller's
            self.handleError(record)


def entry(message: str, level: int, event: Mapping[str, Any]) -> bytes:
    """One of the protocol's messages. Values are shown as the log shows them. Pure."""
    fields = {
        "MESSAGE": message,
        "PRIORITY": str(_PRIORITIES.get(level, 6)),
        "SYSLOG_IDENTIFIER": "virtshim",
        f"{_PREFIX}EVENT": str(event.get("event", "")),
    }
    for key, value in event.items():
        if key not in _TOLD_OTHERWISE and not key.startswith("_") and key != "exc_info" and value is not None:
            fields[_PREFIX + _NOT_IN_NAMES.sub("_", str(key).upper())[:50]] = str(value)
    return b"".join(_field(name, value.encode(errors="backslashreplace")) for name, value in fields.items() if value)


def _field(name: str, value: bytes) -> bytes:
    if b"\n" not in value:
        return name.encode() + b"=" + value + b"\n"
    return name.encode() + b"\n" + len(value).to_bytes(8, "little") + value + b"\n"
