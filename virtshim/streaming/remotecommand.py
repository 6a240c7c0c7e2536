"""Exec and attach: connects a client (SPDY or WebSocket) to a session (a command in the guest, or a console)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import structlog

from virtshim.model.errors import ShimError
from virtshim.streaming.channel import Gone, run_until, then_wait_forever
from virtshim.streaming.ports import Ended, Output, OutStream, StreamSession
from virtshim.streaming.remotecommand_status import Exited, Failed, Outcome

# The resize stream has JSON objects: `{"Width":80,"Height":24}`.

_MAX_PENDING: Final = 4096
_MAX: Final = 0xFFFF  # struct winsize holds 16 bits


class SizeReader:
    """Ignores invalid input, because a wrong size must not end a user's shell."""

    def __init__(self) -> None:
        self._text = ""
        self._decoder = json.JSONDecoder()

    def feed(self, data: bytes) -> tuple[int, int] | None:
        """The newest complete size (width, height), if there is one."""
        text = self._text + data.decode("ascii", errors="replace")
        if len(text) > _MAX_PENDING:
            # Reads only the end, because all sessions wait meanwhile.
            text = text[text.find("{", len(text) - _MAX_PENDING) :]
        newest, place = None, 0
        while place < len(text):
            if text[place].isspace():
                place += 1
                continue
            try:
                value, place = self._decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                break
            newest = _size(value) or newest
        self._text = _pending(text[place:])
        return newest


def _pending(text: str) -> str:
    """The end of the text, if it may be the beginning of an object; "" if not."""
    return text if text.startswith("{") and len(text) < _MAX_PENDING else ""


def _size(value: object) -> tuple[int, int] | None:
    if not isinstance(value, dict):
        return None
    width, height = value.get("Width"), value.get("Height")
    if isinstance(width, int) and isinstance(height, int) and 0 < width <= _MAX and 0 < height <= _MAX:
        return width, height
    return None


log = structlog.get_logger(__name__)

# Seconds for the client to read the rest of the output, and for a session to clean up.
DELIVERY_TIMEOUT: Final = 600.0
_CLEAN_UP: Final = 10.0

# Seconds for a session to end by itself after its container has ended.
_END_GRACE: Final = 2.0


class RemoteClient(Protocol):
    async def run(self) -> None:
        """Moves bytes until the client leaves. Raises Gone."""

    async def ready(self) -> None:
        """Returns when the client has opened all its streams."""

    async def stdin(self) -> bytes:
        """b"" at the end."""

    async def resize(self) -> bytes:
        """Bytes of the resize stream; b"" at the end."""

    async def write(self, stream: OutStream, data: bytes) -> None:
        """Drops output that the client did not ask for. Raises Gone."""

    async def finish(self, outcome: Outcome) -> None:
        """Ends the output and sends the outcome. Raises Gone."""

    def discard_input(self) -> None:
        """Drops further input, so that the client's end is noticed."""


Start = Callable[[], Awaitable[StreamSession]]


async def serve(
    client: RemoteClient, start: Start, ended: asyncio.Event, stream_timeout: float, leaving: float
) -> None:
    """Serves one session. `ended`: the container is gone, or the daemon stops. `stream_timeout` and `leaving`: seconds for
    the client to open its streams, and to close the connection at the end."""
    with contextlib.suppress(Gone):
        await run_until(_whole(client, start, ended, stream_timeout, leaving), client.run())


async def _whole(
    client: RemoteClient, start: Start, ended: asyncio.Event, stream_timeout: float, leaving: float
) -> None:
    """Runs beside `client.run`."""
    outcome = await _outcome(client, start, ended, stream_timeout)
    client.discard_input()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DELIVERY_TIMEOUT):
            await client.finish(outcome)
    # The client should close first, because closing here may lose output that it has not read.
    await asyncio.sleep(leaving)


async def _outcome(client: RemoteClient, start: Start, ended: asyncio.Event, stream_timeout: float) -> Outcome:
    try:
        async with asyncio.timeout(stream_timeout):
            await client.ready()
    except TimeoutError:
        return Failed(f"the client did not open its streams within {stream_timeout:.0f} s")
    try:
        outcome = await run_until(_conversation(client, start), _end_grace(ended))
    except ShimError as exc:
        return Failed(str(exc))
    except Gone:
        raise
    except Exception:
        log.exception("streaming.session.crashed")
        return Failed("virtshim failed to serve this session; its log has the details")
    return outcome or Failed("the container has stopped, or virtshim is stopping")


async def _end_grace(ended: asyncio.Event) -> None:
    await ended.wait()
    await asyncio.sleep(_END_GRACE)


async def _conversation(client: RemoteClient, start: Start) -> Outcome | None:
    """Raises ShimError, Gone."""
    session = await start()
    try:
        return await run_until(
            _output(client, session),
            then_wait_forever(_feed(client, session)),
            then_wait_forever(_resize(client, session)),
        )
    finally:
        await _closed(session)


async def _output(client: RemoteClient, session: StreamSession) -> Outcome:
    while True:
        match await session.read():
            case Output(stream, data):
                await client.write(stream, data)
            case Ended(code):
                return Exited(code)


async def _feed(client: RemoteClient, session: StreamSession) -> None:
    """If the session accepts no more input, its `read` reports why."""
    with contextlib.suppress(ShimError):
        while data := await client.stdin():
            await session.write_stdin(data)
        await session.close_stdin()


async def _resize(client: RemoteClient, session: StreamSession) -> None:
    sizes = SizeReader()
    with contextlib.suppress(ShimError):
        while data := await client.resize():
            if size := sizes.feed(data):
                await session.resize(*size)


async def _closed(session: StreamSession) -> None:
    try:
        async with asyncio.timeout(_CLEAN_UP):
            await session.close()
    except TimeoutError:
        log.warning("streaming.session.stuck", seconds=_CLEAN_UP)
