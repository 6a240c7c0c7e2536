"""Kubernetes' channel protocols on WebSocket: the first byte of each message names a channel. Pure.

Binary protocols: a byte 0 to 255, then the data. base64 protocols (text messages): an ASCII digit, then base64.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from virtshim.streaming.websocket import Fragment


class BadMessage(Exception):
    """The client broke the protocol."""


@dataclass(frozen=True, slots=True)
class Piece:
    channel: int
    data: bytes


class ChannelReader:
    """Takes messages in pieces, so that a message's length costs no memory."""

    def __init__(self, *, in_base64: bool) -> None:
        self._in_base64 = in_base64
        self._channel: int | None = None
        self._carry = b""

    def feed(self, fragment: Fragment) -> Piece | None:
        """None if there is nothing in it yet. Raises BadMessage."""
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
