"""The sockets of the dashboard: on both addresses that a browser may use for the page's name, or on none. Otherwise another
program on the second address could receive requests for the dashboard."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence, Sized
from typing import Final, Protocol

from virtshim.model.errors import WrongState

# The most connections, because any local user can open some. A browser has about six, and one for each page, console and screen
# that it shows.
MOST: Final = 256


class Server(Protocol):
    """aiohttp's server."""

    @property
    def connections(self) -> Sized: ...

    def __call__(self) -> asyncio.Protocol: ...


class ConnectionLimit:
    """Limits the connections: a protocol factory for `create_server`. Connections that arrive at the same moment may exceed
    `most`."""

    def __init__(self, server: Server, most: int = MOST) -> None:
        self._server = server
        self._most = most

    def __call__(self) -> asyncio.Protocol:
        return _Refused() if len(self._server.connections) >= self._most else self._server()


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


_ADDRESSES: Final = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
# The kernel has no IPv6, or loopback lacks the address. No other program can have the address then either.
_NOT_THERE: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
# A port that is free on one address may be in use on the other. 0: the kernel chooses.
_TRIED: Final = (0,) * 16


def listening_sockets(port: int, tried: Sequence[int] = _TRIED) -> list[socket.socket]:
    """Listening sockets on the same port of both addresses. Port 0 means the first free one of `tried`. Raises WrongState."""
    for left, wanted in zip(reversed(range(len(tried))), tried, strict=True):
        bound: list[socket.socket] = []
        try:
            for family, address in _ADDRESSES:
                if (
                    one := _listener(family, address, bound[0].getsockname()[1] if bound else port or wanted)
                ) is not None:
                    bound.append(one)
        except OSError as exc:
            for one in bound:
                one.close()
            if port or not left or exc.errno != errno.EADDRINUSE:
                raise WrongState(
                    f"cannot listen on port {port} of both 127.0.0.1 and ::1: {exc.strerror}; choose another port with --port"
                ) from exc
            continue
        if bound:
            return bound
    raise WrongState("this machine has no loopback address; bring up the interface lo")


def _listener(family: socket.AddressFamily, address: str, port: int) -> socket.socket | None:
    try:
        one = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    except OSError as exc:
        if exc.errno in _NOT_THERE:
            return None
        raise
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind((address, port))
        one.listen(128)
    except OSError as exc:
        one.close()
        if exc.errno in _NOT_THERE:
            return None
        raise
    return one
