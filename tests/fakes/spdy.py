"""A SPDY/3.1 client for tests, written independently of the server: only the dictionary is shared."""

from __future__ import annotations

import socket
import struct
import zlib
from collections import defaultdict
from typing import Any

from virtshim.streaming.spdy.connection import DICTIONARY

SECONDS = 10.0

SYN_STREAM, SYN_REPLY, RST_STREAM, SETTINGS, PING, GOAWAY, HEADERS, WINDOW_UPDATE = 1, 2, 3, 4, 6, 7, 8, 9


def control(kind: int, payload: bytes, flags: int = 0, version: int = 3) -> bytes:
    return struct.pack(">HHB", 0x8000 | version, kind, flags) + len(payload).to_bytes(3, "big") + payload


def data(stream: int, payload: bytes, *, fin: bool = False) -> bytes:
    return struct.pack(">IB", stream, int(fin)) + len(payload).to_bytes(3, "big") + payload


def plain_block(headers: dict[str, str]) -> bytes:
    block = struct.pack(">I", len(headers))
    for text in (part.encode() for item in headers.items() for part in item):
        block += struct.pack(">I", len(text)) + text
    return block


class Writer:
    """Writes frames as a client does, with its one compression context."""

    def __init__(self) -> None:
        self._zlib = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_DEFAULT_STRATEGY, DICTIONARY)

    def block(self, plain: bytes) -> bytes:
        return self._zlib.compress(plain) + self._zlib.flush(zlib.Z_SYNC_FLUSH)

    def syn_stream(self, stream: int, headers: dict[str, str], *, fin: bool = False) -> bytes:
        block = self.block(plain_block(headers))
        return control(SYN_STREAM, struct.pack(">IIBB", stream, 0, 0, 0) + block, int(fin))

    def headers(self, stream: int, headers: dict[str, str]) -> bytes:
        return control(HEADERS, struct.pack(">I", stream) + self.block(plain_block(headers)))


class Reader:
    """Parses frames: ("data", stream, bytes, fin) or (type, flags, payload)."""

    def __init__(self) -> None:
        self._bytes = b""

    def feed(self, received: bytes) -> list[tuple[Any, ...]]:
        self._bytes += received
        frames: list[tuple[Any, ...]] = []
        while len(self._bytes) >= 8:
            length = int.from_bytes(self._bytes[5:8], "big")
            if len(self._bytes) < 8 + length:
                break
            head, payload, self._bytes = self._bytes[:8], self._bytes[8 : 8 + length], self._bytes[8 + length :]
            if head[0] & 0x80:
                assert int.from_bytes(head[:2], "big") == 0x8003
                frames.append((int.from_bytes(head[2:4], "big"), head[4], payload))
            else:
                frames.append(("data", int.from_bytes(head[:4], "big"), payload, bool(head[4] & 1)))
        return frames


class SpdyClient:
    """A client over anything with `sendall` and `recv`."""

    def __init__(self, sock: Any) -> None:
        self.sock = sock
        self.writer = Writer()
        self._reader = Reader()
        self._next = 1
        self.replied: set[int] = set()
        self.reset: dict[int, int] = {}
        self.pongs: list[int] = []
        self.goaway: int | None = None
        self.closed = False
        self.received: dict[int, bytes] = defaultdict(bytes)
        self.finished: set[int] = set()

    def send(self, frame: bytes) -> None:
        self.sock.sendall(frame)

    def open(self, *, fin: bool = False, **headers: str) -> int:
        stream, self._next = self._next, self._next + 2
        self.send(self.writer.syn_stream(stream, headers, fin=fin))
        return stream

    def write(self, stream: int, payload: bytes, *, fin: bool = False) -> None:
        self.send(data(stream, payload, fin=fin))

    def step(self) -> bool:
        """One read; False at the end of the connection."""
        try:
            received = self.sock.recv(1 << 16)
        except ConnectionError:
            received = b""
        if not received:
            self.closed = True
            return False
        for frame in self._reader.feed(received):
            self._take(frame)
        return True

    def _take(self, frame: tuple[Any, ...]) -> None:
        if frame[0] == "data":
            _, stream, payload, fin = frame
            assert stream not in self.finished, "data after its end"
            self.received[stream] += payload
            if fin:
                self.finished.add(stream)
            return
        kind, _flags, payload = frame
        number = int.from_bytes(payload[:4], "big")
        if kind == SYN_REPLY:
            self.replied.add(number)
        elif kind == RST_STREAM:
            self.reset[number] = int.from_bytes(payload[4:8], "big")
        elif kind == PING:
            self.pongs.append(number)
        elif kind == GOAWAY:
            self.goaway = int.from_bytes(payload[4:8], "big")

    def until(self, condition: Any) -> None:
        """Reads until the condition holds. The socket's timeout is the test's."""
        while not condition():
            assert self.step(), "the server has closed the connection"

    def read_all(self, stream: int) -> bytes:
        self.until(lambda: stream in self.finished)
        return self.received[stream]

    def to_the_end(self) -> None:
        while self.step():
            pass

    def leave(self) -> None:
        self.sock.close()


def connected(
    url: str, protocol: str | None, *, method: str = "POST", headers: str = "", receive_buffer: int = 0
) -> tuple[socket.socket, str]:
    """A socket after the request was answered, and the answer's head. `receive_buffer` 0: as the system likes."""
    sock, path = dialled(url, receive_buffer)
    lines = [f"{method} {path} HTTP/1.1", "Host: node", "Connection: Upgrade", "Upgrade: SPDY/3.1"]
    if protocol:
        lines.append(f"X-Stream-Protocol-Version: {protocol}")
    sock.sendall("\r\n".join(lines).encode() + b"\r\n" + headers.encode() + b"\r\n")
    return sock, head_of(sock)


def dialled(url: str, receive_buffer: int = 0) -> tuple[socket.socket, str]:
    host, _, path = url.removeprefix("http://").partition("/")
    address, _, port = host.rpartition(":")
    sock = socket.socket()
    _sockets.append(sock)
    sock.settimeout(SECONDS)
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect((address, int(port)))
    return sock, "/" + path


# Every socket of the running test; `close_all` is called at its end.
_sockets: list[socket.socket] = []


def close_all() -> None:
    while _sockets:
        _sockets.pop().close()


def head_of(sock: socket.socket) -> str:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = sock.recv(1)
        if not byte:
            break
        head += byte
    return head.decode()


def spdy(url: str, protocol: str | None = "v4.channel.k8s.io", **options: Any) -> SpdyClient:
    sock, head = connected(url, protocol, **options)
    assert head.startswith("HTTP/1.1 101 "), head
    return SpdyClient(sock)
