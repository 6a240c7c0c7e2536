"""Parts of all our daemons: messages to systemd, signals that stop or reload, libraries' extras that no daemon loads."""

from __future__ import annotations

import sys
from typing import Final

from tapmanager.daemon import notify_systemd, reload_requests, stop_event, watchdog_seconds

__all__ = ["do_without_extras", "notify_systemd", "reload_requests", "stop_event", "watchdog_seconds"]

# What structlog and urllib3 import if it is installed.
_EXTRAS: Final = ("backports.zstd", "colorama", "compression.zstd", "greenlet", "rich")


def do_without_extras() -> None:
    """Must be called before structlog and urllib3 are imported. The extras are for tracebacks in colour, which a daemon's log
    never has, for green threads, and for compressed HTTP answers, which a pull does not accept. This saves 6 MiB."""
    for name in _EXTRAS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # means: cannot be imported
