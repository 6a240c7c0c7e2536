"""The client's side of exec, attach and port-forward: Kubernetes' channels on WebSocket. One thread, one non-blocking socket."""

from __future__ import annotations

import socket
from collections import deque
from typing import Final
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    RejectData,
    Request,
)
from wsproto.utilities import RemoteProtocolError

from virtshim.model.errors import InternalError, ResourceExhausted, Unavailable
from virtshim.streaming.websocket import ChannelReader, Fragment, Piece, encode

PROTOCOL: Final = "v5.channel.k8s.io"
FORWARD: Final = "v4.channel.k8s.io"
STDIN, STDOUT, STDERR, ERROR, RESIZE = range(5)
_CLOSE: Final = 255

# The status of a session beyond a limit, which the node's text names.
_TOO_MANY: Final = 429
_CONNECTING: Final = 30.0
_READ: Final = 64 << 10


class StreamClient:
    """A connection after the handshake. The caller waits for readability, and while `pending` for writability."""

    def __init__(self, sock: socket.socket, ws: WSConnection) -> None:
        self._sock = sock
        self._ws = ws
        self._reader = ChannelReader(in_base64=False)
        self._starts = True
        self._unsent = bytearray()
        self._arrived: deque[Piece] = deque()
        self.is_closed = False
        sock.setblocking(False)
        self._take_events()  # those that came with the handshake's answer

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether bytes wait to be sent, so that the caller should send no more."""
        return bool(self._unsent)

    def send(self, channel: int, data: bytes) -> None:
        self._queue(BytesMessage(data=encode(channel, data, in_base64=False)))

    def close_channel(self, channel: int) -> None:
        self.send(_CLOSE, bytes([channel]))

    def receive(self) -> list[Piece]:
        """What has arrived; sets `is_closed` at the end. Raises InternalError if it is not WebSocket."""
        data: bytes | None
        try:
            data = self._sock.recv(_READ)
        except BlockingIOError:
            data = None  # nothing has arrived
        except ConnectionError:
            data = b""
        if data:
            try:
                self._ws.receive_data(data)
                self._take_events()
            except RemoteProtocolError as exc:
                raise InternalError(f"the node broke the streaming protocol: {exc}") from exc
        elif data is not None:
            self.is_closed = True
        pieces = list(self._arrived)
        self._arrived.clear()
        return pieces

    def flush(self) -> None:
        """Sends as much as the socket accepts."""
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._unsent.clear()  # `receive` reports the end

    def _take_events(self) -> None:
        for event in self._ws.events():
            match event:
                case BytesMessage():
                    fragment = Fragment(bytes(event.data), self._starts, event.message_finished)
                    self._starts = event.message_finished
                    if piece := self._reader.feed(fragment):
                        self._arrived.append(piece)
                case Ping():
                    self._queue(event.response())
                case CloseConnection():
                    self._queue(event.response())
                    self.is_closed = True
                case _:
                    pass

    def _queue(self, event: Event) -> None:
        self._unsent += self._ws.send(event)
        self.flush()

    def close(self) -> None:
        self._sock.close()


def connect(url: str, protocol: str = PROTOCOL) -> StreamClient:
    """Connects to a URL from Exec or Attach, or from PortForward with `FORWARD`. Raises Unavailable, ResourceExhausted,
    InternalError."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    try:
        sock = socket.create_connection((host, port), timeout=_CONNECTING)
    except OSError as exc:
        raise Unavailable(f"the node's streaming server {host}:{port} cannot be reached: {exc}") from exc
    try:
        return StreamClient(sock, _handshake(sock, parts.netloc, parts.path, protocol))
    except OSError as exc:
        sock.close()
        raise Unavailable(f"the node's streaming server {host}:{port} does not answer: {exc}") from exc
    except BaseException:
        sock.close()
        raise


def _handshake(sock: socket.socket, host: str, path: str, protocol: str) -> WSConnection:
    ws = WSConnection(ConnectionType.CLIENT)
    sock.sendall(ws.send(Request(host=host, target=path, subprotocols=[protocol])))
    why = b""
    rejected: int | None = None
    while True:
        data = sock.recv(_READ)
        try:
            ws.receive_data(data or None)
            for event in ws.events():
                match event:
                    case AcceptConnection():
                        return ws
                    case RejectConnection():
                        rejected = event.status_code
                    case RejectData():
                        why += event.data
                    case _:
                        pass
        except RemoteProtocolError as exc:
            raise InternalError(f"the node's answer is not WebSocket: {exc}") from exc
        if not data:
            said = why.decode(errors="replace").strip()
            if rejected == _TOO_MANY:
                raise ResourceExhausted(said)
            raise InternalError(f"the node refused the stream (HTTP {rejected}): {said}")
