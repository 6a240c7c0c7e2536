"""The clients of exec and attach, over SPDY and over WebSocket.

SPDY has one stream each for error, stdin, stdout, stderr and resize. WebSocket has channels: 0 stdin, 1 stdout, 2 stderr, 3
error, 4 resize.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from wsproto.frame_protocol import CloseReason

from virtshim.streaming.channel import ByteChannel, put
from virtshim.streaming.ports import OutStream, Streams
from virtshim.streaming.remotecommand_status import Outcome, as_status, as_text
from virtshim.streaming.room import SessionRoom
from virtshim.streaming.spdy.frames import Status
from virtshim.streaming.spdy.peer import SpdyPeer, SpdyStream
from virtshim.streaming.websocket import BadMessage, ChannelReader, WebSocket, encode

# In the server's order of preference. Clients of Kubernetes 1.0 speak v1 and name no version.
REMOTE_SPDY_PROTOCOLS: Final = (
    "v5.channel.k8s.io",
    "v4.channel.k8s.io",
    "v3.channel.k8s.io",
    "v2.channel.k8s.io",
    "channel.k8s.io",
    "",
)
_WITH_STATUS: Final = frozenset({"v5.channel.k8s.io", "v4.channel.k8s.io"})
_WITH_RESIZE: Final = _WITH_STATUS | {"v3.channel.k8s.io"}

_MAX_STREAMS: Final = 8


class SpdyRemote:
    """Implements `remotecommand.RemoteClient`."""

    def __init__(self, channel: ByteChannel, wanted: Streams, protocol: str, room: SessionRoom) -> None:
        self._protocol = protocol
        self._wanted = _names(wanted, protocol)
        self._streams: dict[str, SpdyStream] = {}
        self._complete = asyncio.Event()
        self._peer = SpdyPeer(channel, _MAX_STREAMS, self._opened, room.pipe)

    def _opened(self, stream: SpdyStream) -> Status | None:
        name = stream.headers.get("streamtype", "").lower()
        if name not in self._wanted or name in self._streams:
            return Status.REFUSED_STREAM
        self._streams[name] = stream
        if self._streams.keys() == self._wanted:
            self._complete.set()
        return None

    async def run(self) -> None:
        await self._peer.run()

    async def ready(self) -> None:
        await self._complete.wait()

    async def stdin(self) -> bytes:
        return await self._read("stdin")

    async def resize(self) -> bytes:
        return await self._read("resize")

    async def _read(self, name: str) -> bytes:
        stream = self._streams.get(name)
        return await stream.read() if stream else b""

    async def write(self, stream: OutStream, data: bytes) -> None:
        target = self._streams.get(stream.value)
        if target is None or target.reset_by_client.is_set():
            return
        await target.write(data)

    async def finish(self, outcome: Outcome) -> None:
        """Ends the output before the error stream, because clients read them in this order."""
        for name in ("stdout", "stderr"):
            if name in self._streams:
                await self._streams[name].finish()
        error = self._streams.get("error")
        if error is not None and not error.reset_by_client.is_set():
            await error.write(as_status(outcome) if self._protocol in _WITH_STATUS else as_text(outcome))
            await error.finish()
        await self._peer.leave()

    def discard_input(self) -> None:
        for stream in self._streams.values():
            stream.incoming.discard()


def _names(wanted: Streams, protocol: str) -> set[str]:
    names = {
        "error": True,
        "stdin": wanted.stdin,
        "stdout": wanted.stdout,
        "stderr": wanted.stderr,
        "resize": wanted.tty and protocol in _WITH_RESIZE,
    }
    return {name for name, is_wanted in names.items() if is_wanted}


log = structlog.get_logger(__name__)

# "" is the oldest protocol, of clients that name none.
REMOTE_WEBSOCKET_PROTOCOLS: Final = (
    "v5.channel.k8s.io",
    "v4.channel.k8s.io",
    "v4.base64.channel.k8s.io",
    "channel.k8s.io",
    "base64.channel.k8s.io",
    "",
)

_STDIN, _ERROR, _RESIZE = 0, 3, 4
_OUT: Final = {OutStream.STDOUT: 1, OutStream.STDERR: 2}

# v5: the second byte names the channel whose input ends.
_V5_CLOSE: Final = 255


class WebSocketRemote:
    """Implements `remotecommand.RemoteClient`."""

    def __init__(self, ws: WebSocket, wanted: Streams, protocol: str, room: SessionRoom) -> None:
        self._ws = ws
        self._in_base64 = "base64" in protocol
        self._with_status = protocol.startswith(("v4.", "v5."))
        self._closes = protocol.startswith("v5.")
        self._out = {OutStream.STDOUT: wanted.stdout, OutStream.STDERR: wanted.stderr}
        self._incoming = {_STDIN: room.pipe(), _RESIZE: room.pipe()}
        if not wanted.stdin:
            self._incoming[_STDIN].discard()
            self._incoming[_STDIN].end()

    async def run(self) -> None:
        reader = ChannelReader(in_base64=self._in_base64)
        try:
            while (fragment := await self._ws.receive()) is not None:
                piece = reader.feed(fragment)
                if piece is None:
                    continue
                if piece.channel == _V5_CLOSE and self._closes:
                    self._half_closed(piece.data)
                elif piece.channel in self._incoming:
                    await put(self._incoming[piece.channel], piece.data, self._ws.gone)
        except BadMessage as exc:
            log.info("streaming.websocket.broken", why=str(exc))
            await self._ws.close(CloseReason.PROTOCOL_ERROR)
        finally:
            for pipe in self._incoming.values():
                pipe.end()

    def _half_closed(self, data: bytes) -> None:
        pipe = self._incoming.get(data[0])
        if pipe is not None:
            pipe.end()

    async def ready(self) -> None:
        """Sends an empty message on the first channel that the client reads, which tells it that the session is ready."""
        first = next((number for stream, number in _OUT.items() if self._out[stream]), _ERROR)
        await self._send(first, b"")

    async def stdin(self) -> bytes:
        return await self._incoming[_STDIN].read()

    async def resize(self) -> bytes:
        return await self._incoming[_RESIZE].read()

    async def write(self, stream: OutStream, data: bytes) -> None:
        if self._out[stream]:
            await self._send(_OUT[stream], data)

    async def finish(self, outcome: Outcome) -> None:
        status = as_status(outcome) if self._with_status else as_text(outcome)
        if status:
            await self._send(_ERROR, status)
        await self._ws.close()

    def discard_input(self) -> None:
        for pipe in self._incoming.values():
            pipe.discard()

    async def _send(self, channel: int, data: bytes) -> None:
        await self._ws.send(encode(channel, data, in_base64=self._in_base64), text=self._in_base64)
