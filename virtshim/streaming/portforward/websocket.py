"""Port forwarding over WebSocket, for clients without SPDY: channels 2i and 2i+1 are data and error of the i-th port.

The ports are those of the request. This protocol has no half-close and one connection a port.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Sequence
from typing import Final

import structlog
from wsproto.frame_protocol import CloseReason

from virtshim.streaming.channel import Gone, put
from virtshim.streaming.channel_messages import BadMessage, ChannelReader, encode
from virtshim.streaming.pipe import Pipe
from virtshim.streaming.portforward.splice import Dial, ForwardFailed, splice
from virtshim.streaming.racing import run_until
from virtshim.streaming.room import SessionRoom
from virtshim.streaming.websocket import WebSocket

log = structlog.get_logger(__name__)

PROTOCOLS: Final = ("v4.channel.k8s.io", "v4.base64.channel.k8s.io")

# Raw SPDY inside binary messages.
TUNNEL: Final = "SPDY/3.1+portforward.k8s.io"

# Channel numbers are one byte; those of the base64 protocol one digit.
_MAX_PORTS: Final = 127
_MAX_PORTS_BASE64: Final = 5


def max_ports(protocol: str) -> int:
    return _MAX_PORTS_BASE64 if "base64" in protocol else _MAX_PORTS


class _Port:
    """Implements `splice.ClientEnd`."""

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
        """The protocol has no word for half an end: the pod's is the end of both ways."""
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
        """Until the client leaves, all ports have ended, or `ended`: the pod has stopped."""
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
            # Each channel begins with the port's number, so that clients can check that both count alike.
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
