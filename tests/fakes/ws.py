"""A WebSocket client for tests, by hand (RFC 6455), and a socket that tunnels through it."""

from __future__ import annotations

import base64
import hashlib
import os
from typing import Any

from fakes.spdy import dialled, head_of

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10


def asked(url: str, protocol: str | None, *, method: str = "GET", key: str | None = None, extra: str = "") -> Any:
    """The socket, the head of the answer, and the expected accept token."""
    key = base64.b64encode(os.urandom(16)).decode() if key is None else key
    sock, path = dialled(url)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: node\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n{extra}"
    )
    if protocol is not None:
        head += f"Sec-WebSocket-Protocol: {protocol}\r\n"
    sock.sendall(head.encode() + b"\r\n")
    digest = hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
    return sock, head_of(sock), base64.b64encode(digest).decode()


class WsClient:
    def __init__(self, sock: Any) -> None:
        self.sock = sock
        self._bytes = b""
        self.close_code: int | None = None

    def frame(self, opcode: int, payload: bytes, *, fin: bool = True, masked: bool = True) -> None:
        head = bytes([(0x80 if fin else 0) | opcode])
        mask_bit = 0x80 if masked else 0
        if len(payload) < 126:
            head += bytes([mask_bit | len(payload)])
        elif len(payload) < 1 << 16:
            head += bytes([mask_bit | 126]) + len(payload).to_bytes(2, "big")
        else:
            head += bytes([mask_bit | 127]) + len(payload).to_bytes(8, "big")
        if masked:
            mask = os.urandom(4)
            whole = (mask * (len(payload) // 4 + 1))[: len(payload)]
            payload = (int.from_bytes(payload, "big") ^ int.from_bytes(whole, "big")).to_bytes(len(payload), "big")
            head += mask
        self.sock.sendall(head + payload)

    def send(self, channel: int, payload: bytes) -> None:
        self.frame(BINARY, bytes([channel]) + payload)

    def send_base64(self, channel: int, payload: bytes) -> None:
        self.frame(TEXT, str(channel).encode() + base64.b64encode(payload))

    def close(self, code: int = 1000) -> None:
        self.frame(CLOSE, code.to_bytes(2, "big"))

    def _exactly(self, count: int) -> bytes:
        while len(self._bytes) < count:
            received = self.sock.recv(1 << 16)
            if not received:
                raise EOFError
            self._bytes += received
        out, self._bytes = self._bytes[:count], self._bytes[count:]
        return out

    def next(self) -> tuple[int, bytes]:
        """The next frame: opcode and payload. EOFError at the end."""
        first, second = self._exactly(2)
        assert not second & 0x80, "a server must not mask"
        length = second & 0x7F
        if length >= 126:
            length = int.from_bytes(self._exactly(2 if length == 126 else 8), "big")
        payload = self._exactly(length)
        if first & 0x0F == CLOSE:
            self.close_code = int.from_bytes(payload[:2], "big") if payload else 1005
        return first & 0x0F, payload

    def message(self) -> tuple[int, bytes]:
        """The next binary message: channel and data."""
        opcode, payload = self.next()
        assert opcode == BINARY, (opcode, payload)
        return payload[0], payload[1:]

    def message_base64(self) -> tuple[int, bytes]:
        opcode, payload = self.next()
        assert opcode == TEXT, (opcode, payload)
        return payload[0] - 0x30, base64.b64decode(payload[1:])

    def all_until_close(self) -> dict[int, bytes]:
        """The data of all channels."""
        got: dict[int, bytes] = {}
        while True:
            opcode, payload = self.next()
            if opcode == CLOSE:
                return got
            got[payload[0]] = got.get(payload[0], b"") + payload[1:]


def websocket(url: str, protocol: str | None = "v4.channel.k8s.io") -> WsClient:
    sock, head, accept = asked(url, protocol)
    assert head.startswith("HTTP/1.1 101 "), head
    assert f"sec-websocket-accept: {accept}\r\n".lower() in head.lower()
    assert ("sec-websocket-protocol" in head.lower()) == (protocol is not None)
    return WsClient(sock)


class Tunnel:
    """A socket's `sendall` and `recv` through binary messages, with empty ones in between."""

    def __init__(self, client: WsClient) -> None:
        self._client = client

    def sendall(self, payload: bytes) -> None:
        self._client.frame(BINARY, b"")
        half = len(payload) // 2
        self._client.frame(BINARY, payload[:half])
        self._client.frame(BINARY, payload[half:])

    def recv(self, size: int) -> bytes:
        while True:
            try:
                opcode, payload = self._client.next()
            except EOFError:
                return b""
            if opcode == CLOSE:
                return b""
            if payload:
                return payload

    def close(self) -> None:
        self._client.sock.close()
