"""A VM's console and screen, between a page's WebSocket and that of the node's streaming server.

The page says how much of a console it has shown. What it has not is bounded: then the node is not read, and what the guest floods
is lost there, for this page alone, as for any client that is too slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import aiohttp
from aiohttp import WSMsgType, web

from virtshim.model.errors import ShimError, Unavailable
from virtshim.streaming.client import ERROR, FORWARD, PROTOCOL, RESIZE, STDERR, STDIN, STDOUT
from virtshim.streaming.remotecommand_status import Failed, from_status

# Bytes on their way to a page.
_AHEAD: Final = 512 << 10
# Of one message, of a page or the node.
_MESSAGE: Final = 1 << 20
_CONNECTING: Final = 15.0
_LARGEST_SIZE: Final = 1000
# Channels of a forward's one port. Each begins with the port's number, two bytes.
_DATA, _FAILURE, _NUMBER = 0, 1, 2
# Bytes of a reason in a close frame.
_REASON: Final = 123

# Reasons to close a page's WebSocket, of the range that is for applications.
ENDED: Final = 4000
REFUSED: Final = 4001


class Window:
    """How many bytes may still be sent to a page."""

    def __init__(self, size: int = _AHEAD) -> None:
        self._left = size
        self._size = size
        self._open = asyncio.Event()
        self._open.set()

    def sent(self, count: int) -> None:
        self._left -= count
        if self._left <= 0:
            self._open.clear()

    def shown(self, count: int) -> None:
        """Never more than was sent: a page may say anything."""
        self._left = min(self._size, self._left + count)
        if self._left > 0:
            self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def wait(self) -> None:
        await self._open.wait()


async def console(page: web.WebSocketResponse, ask: Callable[[], tuple[str, bool]]) -> None:
    """Until the page leaves or the console ends."""
    try:
        url, takes_input = await asyncio.to_thread(ask)
        async with _connected(url, PROTOCOL) as node:
            await page.send_json({"type": "attached", "input": takes_input})
            window = Window()
            await _first_of(_from_console(node, page, window), _to_console(page, node, window, takes_input))
    except ShimError as exc:
        await close(page, REFUSED, str(exc))


async def screen(page: web.WebSocketResponse, ask: Callable[[], str]) -> None:
    """Bytes of RFB, both ways."""
    try:
        url = await asyncio.to_thread(ask)
        async with _connected(url, FORWARD) as node:
            await _first_of(_from_screen(node, page), _to_screen(page, node))
    except ShimError as exc:
        await close(page, REFUSED, str(exc))


async def _from_console(node: aiohttp.ClientWebSocketResponse, page: web.WebSocketResponse, window: Window) -> None:
    status = b""
    async for channel, data in _pieces(node):
        if channel == ERROR:
            status += data[: _MESSAGE - len(status)]
        elif channel in (STDOUT, STDERR):
            await page.send_bytes(data)
            window.sent(len(data))
            await window.wait()
    outcome = from_status(status) if status else Failed("the node closed the stream before its end")
    await close(page, ENDED, outcome.message if isinstance(outcome, Failed) else "")


async def _to_console(
    page: web.WebSocketResponse, node: aiohttp.ClientWebSocketResponse, window: Window, takes_input: bool
) -> None:
    async for message in page:
        if message.type is WSMsgType.BINARY and takes_input:
            await node.send_bytes(bytes([STDIN]) + message.data)
        elif message.type is WSMsgType.TEXT:
            said = _said(message.data)
            window.shown(max(0, said.get("shown", 0)))
            if size := _size(said):
                await node.send_bytes(bytes([RESIZE]) + json.dumps(size).encode())


def _said(text: str) -> dict[str, int]:
    """The numbers of a page's message."""
    try:
        said = json.loads(text)
    except ValueError:
        return {}
    return {k: v for k, v in said.items() if type(v) is int} if isinstance(said, dict) else {}


def _size(said: dict[str, int]) -> dict[str, int] | None:
    columns, rows = said.get("columns", 0), said.get("rows", 0)
    if not (0 < columns <= _LARGEST_SIZE and 0 < rows <= _LARGEST_SIZE):
        return None
    return {"Width": columns, "Height": rows}


async def _from_screen(node: aiohttp.ClientWebSocketResponse, page: web.WebSocketResponse) -> None:
    begun = {_DATA: 0, _FAILURE: 0}
    failure = b""
    async for channel, data in _pieces(node):
        if channel not in begun:
            continue
        rest = min(len(data), _NUMBER - begun[channel])
        begun[channel] += rest
        if channel == _FAILURE:
            failure += data[rest : rest + 1000]
        elif len(data) > rest:
            await page.send_bytes(data[rest:])
        if failure:
            break
    await close(page, REFUSED if failure else ENDED, failure.decode(errors="replace"))


async def _to_screen(page: web.WebSocketResponse, node: aiohttp.ClientWebSocketResponse) -> None:
    async for message in page:
        if message.type is WSMsgType.BINARY:
            await node.send_bytes(bytes([_DATA]) + message.data)


async def _pieces(node: aiohttp.ClientWebSocketResponse) -> AsyncIterator[tuple[int, bytes]]:
    async for message in node:
        if message.type is WSMsgType.BINARY and message.data:
            yield message.data[0], message.data[1:]


@contextlib.asynccontextmanager
async def _connected(url: str, protocol: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """The URL is the node's own: nothing of the environment, such as a proxy, gets between. The connection is dropped, not closed
    in order: a console that floods would have to be read to its end."""
    connecting = aiohttp.ClientTimeout(total=None, connect=_CONNECTING)
    async with aiohttp.ClientSession(timeout=connecting, trust_env=False) as session:
        try:
            node = await session.ws_connect(url, protocols=[protocol], max_msg_size=_MESSAGE, autoping=True)
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise Unavailable(f"the node's streaming server does not take the connection: {exc}") from exc
        yield node


async def _first_of(*works: Any) -> None:
    """Until one ends; the others are given up. A connection that broke has ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, (OSError, aiohttp.ClientError)):
            raise result


async def close(page: web.WebSocketResponse, code: int, why: str) -> None:
    """A reason that is no UTF-8, as one cut in the middle of a letter, is no reason to a browser but a broken connection."""
    reason = why.encode(errors="replace")[:_REASON].decode(errors="ignore")
    await page.close(code=code, message=reason.encode())
