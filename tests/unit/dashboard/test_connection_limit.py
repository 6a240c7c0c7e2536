"""Connections beyond the dashboard's limit are closed; open ones are still served."""

from __future__ import annotations

import asyncio

from aiohttp import web

from virtshim.dashboard.listening import ConnectionLimit

ASKS = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answered(port: int) -> tuple[bool, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(ASKS)
        return (await reader.readuntil(b"fine")).startswith(b"HTTP/1.1 200"), writer
    except (ConnectionError, asyncio.IncompleteReadError):
        return False, writer


async def three_callers_where_two_are_taken() -> list[bool]:
    async def handler(_request: web.BaseRequest) -> web.Response:
        return web.Response(text="fine")

    server = web.Server(handler)
    listener = await asyncio.get_running_loop().create_server(ConnectionLimit(server, 2), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    callers = [await answered(port) for _ in range(3)]
    for _, writer in callers:
        writer.close()
    listener.close()
    await server.shutdown(0)
    return [was for was, _ in callers]


def test_a_connection_beyond_the_limit_is_closed() -> None:
    assert asyncio.run(three_callers_where_two_are_taken()) == [True, True, False]
