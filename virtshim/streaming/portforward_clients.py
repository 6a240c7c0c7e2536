"""Port forwarding over SPDY and over WebSocket.

SPDY: each connection has an error and a data stream, paired by the request id in their headers. WebSocket: channels 2i and
2i+1 are data and error of the request's i-th port. It has no half-close, and only one connection per port.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
from wsproto.frame_protocol import CloseReason

from virtshim.streaming.channel import ByteChannel, Gone, Pipe, put, run_until
from virtshim.streaming.portforward import Dial, ForwardFailed, splice
from virtshim.streaming.room import SessionRoom
from virtshim.streaming.spdy.frames import Status
from virtshim.streaming.spdy.peer import SpdyPeer, SpdyStream
from virtshim.streaming.websocket import BadMessage, ChannelReader, WebSocket, encode

log = structlog.get_logger(__name__)

FORWARD_SPDY_PROTOCOLS: Final = ("portforward.k8s.io",)

# Two streams per connection.
_MAX_STREAMS: Final = 1000


@dataclass(slots=True)
class _Half:
    """The first stream of a pair, and the task that waits for the second."""

    stream: SpdyStream
    kind: str
    port: int
    overdue: asyncio.Task[None]


class SpdyForward:
    """A client's connections to a pod."""

    def __init__(self, channel: ByteChannel, address: str, dial: Dial, pairing: float, room: SessionRoom) -> None:
        """`pairing`: seconds to wait for the second stream of a pair."""
        self._address = address
        self._dial = dial
        self._pairing = pairing
        self._room = room
        self._halves: dict[str, _Half] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._peer = SpdyPeer(channel, _MAX_STREAMS, self._opened, room.pipe)

    async def serve(self, ended: asyncio.Event) -> None:
        """Serves until the client leaves, or `ended`, because the pod has stopped."""
        try:
            await run_until(self._peer.run(), ended.wait())
        except Gone:
            pass
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            with contextlib.suppress(Gone):
                await self._peer.leave()

    def _opened(self, stream: SpdyStream) -> Status | None:
        kind = stream.headers.get("streamtype", "")
        port = _port(stream.headers.get("port", ""))
        if kind not in ("error", "data") or port is None:
            return Status.REFUSED_STREAM
        key = stream.headers.get("requestid", "") or _key_without_request_id(stream.number, kind)
        half = self._halves.get(key)
        if half is None:
            self._halves[key] = _Half(stream, kind, port, self._spawn(self._overdue(key)))
        elif half.kind == kind or half.port != port:
            return Status.REFUSED_STREAM
        else:
            del self._halves[key]
            half.overdue.cancel()
            error, data = (half.stream, stream) if kind == "data" else (stream, half.stream)
            _ = self._spawn(self._connection(error, data, port))
        return None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("streaming.forward.crashed", exc_info=error)

    async def _overdue(self, key: str) -> None:
        await asyncio.sleep(self._pairing)
        stream = self._halves.pop(key).stream
        with contextlib.suppress(Gone):
            if stream.headers["streamtype"] == "error":
                await stream.write(b"the data stream of this connection was not opened in time")
                await stream.finish()
            else:
                await stream.reset()

    async def _connection(self, error: SpdyStream, data: SpdyStream, port: int) -> None:
        error.incoming.discard()
        failed = ""
        try:
            with self._room.connection():
                await run_until(splice(data, self._dial, self._address, port), data.reset_by_client.wait())
        except ForwardFailed as exc:
            failed = str(exc)
        except Gone:
            pass
        with contextlib.suppress(Gone):
            data.incoming.discard()
            if failed:
                await error.write(failed.encode(errors="replace"))
            await data.finish()
            await error.finish()
            # If the client still sends but the pod reads no more, the reset tells the client.
            if not data.incoming.ended:
                await data.reset()


def _port(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        return None
    return int(text) if 1 <= int(text) <= 65535 else None


def _key_without_request_id(number: int, kind: str) -> str:
    """Clients without request ids open the error stream and then the data stream, whose number is the next odd one."""
    return f"stream {number if kind == 'error' else number - 2}"


FORWARD_WEBSOCKET_PROTOCOLS: Final = ("v4.channel.k8s.io", "v4.base64.channel.k8s.io")

# SPDY inside binary messages.
WEBSOCKET_TUNNEL: Final = "SPDY/3.1+portforward.k8s.io"

# A channel number is one byte, in the base64 protocol one digit.
_MAX_PORTS: Final = 127
_MAX_PORTS_BASE64: Final = 5


def websocket_max_ports(protocol: str) -> int:
    return _MAX_PORTS_BASE64 if "base64" in protocol else _MAX_PORTS


class _Port:
    """Implements `portforward.ClientEnd`."""

    def __init__(self, forward: WebSocketForward, index: int, incoming: Pipe) -> None:
        self._forward = forward
        self._index = index
        self.incoming = incoming

    async def read(self) -> bytes:
        return await self.incoming.read()

    async def write(self, data: bytes) -> None:
        await self._forward.send(2 * self._index, data)

    async def write_error(self, data: bytes) -> None:
        await self._forward.send(2 * self._index + 1, data)

    async def finish(self) -> None:
        """Ends both directions, because the protocol has no half-close."""
        self.incoming.discard()
        self.incoming.end()


class WebSocketForward:
    def __init__(
        self, ws: WebSocket, address: str, ports: Sequence[int], protocol: str, dial: Dial, room: SessionRoom
    ) -> None:
        self._ws = ws
        self._address = address
        self._numbers = ports
        self._in_base64 = "base64" in protocol
        self._dial = dial
        self._room = room
        self._ports = [_Port(self, index, room.pipe()) for index in range(len(ports))]

    async def serve(self, ended: asyncio.Event) -> None:
        """Serves until the client leaves, all ports have ended, or `ended`, because the pod has stopped."""
        with contextlib.suppress(Gone):
            await run_until(self._forward(), self._receive(), ended.wait())
            await self._ws.close()

    async def _receive(self) -> None:
        reader = ChannelReader(in_base64=self._in_base64)
        try:
            while (fragment := await self._ws.receive()) is not None:
                piece = reader.feed(fragment)
                if piece is not None and piece.channel % 2 == 0 and piece.channel < 2 * len(self._ports):
                    await put(self._ports[piece.channel // 2].incoming, piece.data, self._ws.gone)
        except BadMessage as exc:
            log.info("streaming.websocket.broken", why=str(exc))
            await self._ws.close(CloseReason.PROTOCOL_ERROR)

    async def _forward(self) -> None:
        for port, number in zip(self._ports, self._numbers, strict=True):
            # Each channel begins with the port's number, so that clients can check it.
            await port.write(struct.pack("<H", number))
            await port.write_error(struct.pack("<H", number))
        await asyncio.gather(
            *(self._one(port, number) for port, number in zip(self._ports, self._numbers, strict=True))
        )

    async def _one(self, port: _Port, number: int) -> None:
        try:
            with self._room.connection():
                await splice(port, self._dial, self._address, number)
        except ForwardFailed as exc:
            await port.write_error(str(exc).encode(errors="replace"))
        finally:
            port.incoming.discard()

    async def send(self, channel: int, data: bytes) -> None:
        await self._ws.send(encode(channel, data, in_base64=self._in_base64), text=self._in_base64)
