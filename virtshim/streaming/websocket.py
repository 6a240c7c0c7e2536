"""WebSocket over a byte channel, by wsproto, and Kubernetes' channel protocols on it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections import deque
from dataclasses import dataclass

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError

from virtshim.streaming.channel import TURN, ByteChannel


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of a message, as it arrived. `data` may be empty."""

    data: bytes
    starts: bool
    ends: bool


class WebSocket:
    """The server's side, after the handshake. One task receives; any may send."""

    def __init__(self, channel: ByteChannel) -> None:
        self._channel = channel
        self._ws = Connection(ConnectionType.SERVER)
        self._fragments: deque[Fragment] = deque()
        self._between_messages = True
        self._closed = False

    async def receive(self) -> Fragment | None:
        """None when the client has closed. Raises Gone."""
        while not self._fragments:
            if self._closed:
                return None
            data = await self._channel.receive()
            if not data:
                return None
            self._ws.receive_data(data)
            for number, event in enumerate(self._ws.events(), 1):
                await self._handle(event)
                if number % TURN == 0:
                    await asyncio.sleep(0)
        if len(self._fragments) % TURN == 0:
            await asyncio.sleep(0)  # handling a frame takes as long as reading it
        return self._fragments.popleft()

    async def _handle(self, event: Event) -> None:
        match event:
            case BytesMessage() | TextMessage():
                data = event.data.encode() if isinstance(event.data, str) else bytes(event.data)
                self._fragments.append(Fragment(data, self._between_messages, event.message_finished))
                self._between_messages = event.message_finished
            case Ping():
                await self._send(event.response())
            case CloseConnection():
                # The client closes, or wsproto found a frame that breaks the protocol.
                self._closed = True
                await self._send(CloseConnection(code=event.code, reason=event.reason))
            case _:
                pass

    async def send(self, data: bytes, *, text: bool = False) -> None:
        """One whole message. Raises Gone."""
        await self._send(TextMessage(data=data.decode("ascii")) if text else BytesMessage(data=data))

    async def close(self, code: CloseReason = CloseReason.NORMAL_CLOSURE) -> None:
        if self._ws.state is ConnectionState.OPEN:
            await self._send(CloseConnection(code=code))

    async def _send(self, event: Event) -> None:
        with contextlib.suppress(LocalProtocolError):  # already closing
            await self._channel.send(self._ws.send(event))

    def gone(self) -> bool:
        return self._closed or self._channel.gone()


class TunnelChannel:
    """A byte channel inside a WebSocket's binary messages. Empty messages are allowed and ignored."""

    def __init__(self, ws: WebSocket) -> None:
        self._ws = ws

    async def receive(self) -> bytes:
        while (fragment := await self._ws.receive()) is not None:
            if fragment.data:
                return fragment.data
        return b""

    async def send(self, data: bytes) -> None:
        if data:
            await self._ws.send(data)

    def gone(self) -> bool:
        return self._ws.gone()

    async def close(self) -> None:
        """Raises Gone."""
        await self._ws.close()


# Kubernetes' channel protocols: the first byte of each message names a channel. Binary protocols have a byte 0 to 255 and
# the data. base64 protocols (text messages) have an ASCII digit and base64.


class BadMessage(Exception):
    """The client broke the protocol."""


@dataclass(frozen=True, slots=True)
class Piece:
    channel: int
    data: bytes


class ChannelReader:
    """Reads messages piece by piece, so that long ones need no memory."""

    def __init__(self, *, in_base64: bool) -> None:
        self._in_base64 = in_base64
        self._channel: int | None = None
        self._carry = b""

    def feed(self, fragment: Fragment) -> Piece | None:
        """None if the fragment adds no data. Raises BadMessage."""
        data = fragment.data
        if fragment.starts:
            self._channel, self._carry = None, b""
        if self._channel is None:
            if not data:
                return None
            self._channel, data = self._number(data[0]), data[1:]
        if self._in_base64:
            data = self._decoded(data, last=fragment.ends)
        return Piece(self._channel, data) if data else None

    def _number(self, first: int) -> int:
        if not self._in_base64:
            return first
        if not 0x30 <= first <= 0x39:
            raise BadMessage("a message must begin with the digit of its channel")
        return first - 0x30

    def _decoded(self, data: bytes, *, last: bool) -> bytes:
        data = self._carry + data
        whole = len(data) if last else len(data) // 4 * 4
        data, self._carry = data[:whole], data[whole:]
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error as exc:
            raise BadMessage(f"not base64: {exc}") from exc


def encode(channel: int, data: bytes, *, in_base64: bool) -> bytes:
    if in_base64:
        return bytes([0x30 + channel]) + base64.b64encode(data)
    return bytes([channel]) + data
