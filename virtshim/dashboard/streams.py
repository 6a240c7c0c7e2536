"""Relays a VM's console and screen between a page's WebSocket and the node's streaming server.

The page reports how many bytes of a console it has shown. If too many are outstanding, the dashboard stops reading from the node,
which then drops output for this page, as for any slow client.
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

# Most bytes that are sent to a page but not shown yet.
_AHEAD: Final = 512 << 10
# Bytes of one message, from a page or the node.
_MESSAGE: Final = 1 << 20
_CONNECTING: Final = 15.0
_LARGEST_SIZE: Final = 1000
# The two channels of the forwarded port. Each begins with the port's number, two bytes.
_DATA, _FAILURE, _NUMBER = 0, 1, 2
# Most bytes of the reason in a close frame.
_REASON: Final = 123

# Close codes of a page's WebSocket, from the range for applications.
ENDED: Final = 4000
REFUSED: Final = 4001
OVER: Final = 4002


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
        """Counts at most the bytes that were sent, because a page may report any number."""
        self._left = min(self._size, self._left + count)
        if self._left > 0:
            self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def wait(self) -> None:
        await self._open.wait()


async def console(
    page: web.WebSocketResponse, ask: Callable[[], tuple[str, bool]], earlier: Callable[[], bytes]
) -> None:
    """Relays a console until the page leaves or the console ends. First sends the console's earlier output, of which it may
    send the last part twice, because the live output begins before the earlier output is read."""
    try:
        url, takes_input = await asyncio.to_thread(ask)
        async with _connected(url, PROTOCOL) as node:
            before = await asyncio.to_thread(earlier)
            await page.send_json({"type": "attached", "input": takes_input, "earlier": bool(before)})
            window = Window()
            if before:
                await page.send_bytes(before)
                window.sent(len(before))
            await _first_of(_from_console(node, page, window), _to_console(page, node, window, takes_input))
    except ShimError as exc:
        await close(page, REFUSED, str(exc))


async def screen(page: web.WebSocketResponse, ask: Callable[[], str]) -> None:
    """Relays the bytes of RFB in both directions."""
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
    """The numbers in a message from a page."""
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
    """Connects to the node's URL, ignoring the environment, such as proxy variables. At the end the connection is dropped, not
    closed: an orderly close would have to read all output of a flooding console."""
    connecting = aiohttp.ClientTimeout(total=None, connect=_CONNECTING)
    async with aiohttp.ClientSession(timeout=connecting, trust_env=False) as session:
        try:
            node = await session.ws_connect(url, protocols=[protocol], max_msg_size=_MESSAGE, autoping=True)
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise Unavailable(
                f"the node's streaming server refuses the connection: {exc}; is virtshim running?"
            ) from exc
        yield node


async def _first_of(*works: Any) -> None:
    """Waits until one ends, and cancels the others. A broken connection counts as ended."""
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
    """Closes the WebSocket. The reason must be valid UTF-8, even if it is cut, or a browser sees a broken connection."""
    reason = why.encode(errors="replace")[:_REASON].decode(errors="ignore")
    await page.close(code=code, message=reason.encode())
