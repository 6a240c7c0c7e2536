"""Accepts connections on the event loop.

Not asyncio's own server: closing it loses the connections that it accepts at that moment.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Final

import structlog

log = structlog.get_logger(__name__)

# Seconds without accepting after it failed.
_RETRY_PAUSE: Final = 1.0


class ConnectionListener:
    """Open while its `async with` lasts; then the listener is closed. `on_connection` gets each new socket, and owns it."""

    def __init__(self, listener: socket.socket, on_connection: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._on_connection = on_connection
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        self._listener.setblocking(False)
        self._open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _open(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:  # no descriptors left: whoever waits is served when there are some again
            log.warning("streaming.accept.failed", error=str(exc))
            self._loop.remove_reader(self._listener)
            self._again = self._loop.call_later(_RETRY_PAUSE, self._open)
            return
        sock.setblocking(False)
        self._on_connection(sock)
