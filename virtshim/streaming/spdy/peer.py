"""Serves a SPDY client on the event loop: `spdy.connection` over a byte channel, with a bounded pipe for each stream.

Kubernetes' SPDY has no flow control per stream. So if a stream's pipe is full, the whole connection waits until there is room.
Memory stays bounded and nothing is lost, but the streams of a connection can block each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from virtshim.streaming.channel import PIECE, TURN, ByteChannel, Gone, Pipe, put
from virtshim.streaming.spdy.connection import (
    Event,
    GoneAway,
    HalfClosed,
    Opened,
    Received,
    Reset,
    SpdyConnection,
)
from virtshim.streaming.spdy.frames import SpdyError, Status

log = structlog.get_logger(__name__)


class SpdyStream:
    """One stream that the client opened. Writing to a stream that was reset raises Gone."""

    def __init__(self, peer: SpdyPeer, number: int, headers: Mapping[str, str], incoming: Pipe) -> None:
        self.number = number
        self.headers = headers
        self.incoming = incoming
        self.reset_by_client = asyncio.Event()
        self._peer = peer

    async def read(self) -> bytes:
        """b"" after the client's end of input, or its reset."""
        return await self.incoming.read()

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), PIECE):
            await self._peer.send(self.number, data[at : at + PIECE])

    async def finish(self) -> None:
        """Ends our output. May be called twice."""
        await self._peer.send(self.number, b"", fin=True)

    async def reset(self, status: Status = Status.CANCEL) -> None:
        self.incoming.discard()
        self.incoming.end()
        await self._peer.reset(self, status)


class SpdyPeer:
    def __init__(
        self,
        channel: ByteChannel,
        max_streams: int,
        on_open: Callable[[SpdyStream], Status | None],
        make_pipe: Callable[[], Pipe],
    ) -> None:
        """`on_open`: called for each new stream; returns why it is refused, or None. `make_pipe`: makes the pipe for a stream's
        input."""
        self._channel = channel
        self._spdy = SpdyConnection(max_streams)
        self._on_open = on_open
        self._make_pipe = make_pipe
        self._streams: dict[int, SpdyStream] = {}

    async def run(self) -> None:
        """Moves bytes until the client leaves. Raises Gone."""
        try:
            while data := await self._channel.receive():
                try:
                    await self._take(data)
                except SpdyError as exc:
                    log.info("streaming.spdy.broken", why=str(exc))
                    await self._flush()
                    return
        finally:
            for stream in self._streams.values():
                stream.incoming.end()

    async def _take(self, data: bytes) -> None:
        """Raises Gone, and SpdyError after it has handled all events before the error."""
        for number, events in enumerate(self._spdy.arriving(data), 1):
            if events:
                await self._flush()  # before events that may wait
            for event in events:
                await self._handle(event)
            if number % TURN == 0:
                await asyncio.sleep(0)
        await self._flush()

    async def _handle(self, event: Event) -> None:
        match event:
            case Opened(number, headers):
                await self._opened(SpdyStream(self, number, headers, self._make_pipe()))
            case Received(number, data):
                stream = self._streams.get(number)
                if stream is not None:
                    await put(stream.incoming, data, self._channel.gone)
            case HalfClosed(number):
                stream = self._streams.get(number)
                if stream is not None:
                    stream.incoming.end()
                    self._forget_if_closed(number)
            case Reset(number):
                stream = self._streams.pop(number, None)
                if stream is not None:
                    stream.reset_by_client.set()
                    stream.incoming.end()
            case GoneAway():
                pass

    async def _opened(self, stream: SpdyStream) -> None:
        refused = self._on_open(stream)
        if refused is not None:
            self._spdy.reset(stream.number, refused)
        else:
            self._streams[stream.number] = stream
            self._spdy.reply(stream.number)
        await self._flush()

    async def send(self, number: int, data: bytes, *, fin: bool = False) -> None:
        stream = self._streams.get(number)
        if stream is None or not self._spdy.writable(number):
            if fin:
                return
            raise Gone("the client has reset the stream")
        self._spdy.data(number, data, fin=fin)
        if fin:
            self._forget_if_closed(number)
        await self._flush()

    async def reset(self, stream: SpdyStream, status: Status) -> None:
        self._spdy.reset(stream.number, status)
        self._streams.pop(stream.number, None)
        await self._flush()

    async def leave(self) -> None:
        """Tells the client that the connection ends."""
        self._spdy.goaway()
        await self._flush()

    def _forget_if_closed(self, number: int) -> None:
        if not self._spdy.known(number):
            self._streams.pop(number, None)

    async def _flush(self) -> None:
        if data := self._spdy.output():
            await self._channel.send(data)
