"""How many connections are taken: whoever can run a program on this machine can open as many as they like."""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Final, Protocol

# A browser has some six, and one for each page, console and screen that it shows.
MOST: Final = 256


class Server(Protocol):
    """aiohttp's."""

    @property
    def connections(self) -> Sized: ...

    def __call__(self) -> asyncio.Protocol: ...


class Door:
    """Makes the protocol of each new connection, as `create_server` asks for one. Some that come at the same moment may be more
    than `most`."""

    def __init__(self, server: Server, most: int = MOST) -> None:
        self._server = server
        self._most = most

    def __call__(self) -> asyncio.Protocol:
        return _Refused() if len(self._server.connections) >= self._most else self._server()


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
