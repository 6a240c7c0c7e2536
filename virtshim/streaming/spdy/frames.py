"""Decodes and encodes SPDY/3.1 frames. Pure; knows nothing of streams.

Data frames, of up to 16 MiB, are passed on piece by piece and need no memory. Control frames are kept until they are complete, so
they have a limit.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

VERSION: Final = 3
FLAG_FIN: Final = 0x01

# Real clients' compressed headers have some hundred bytes, and a full SETTINGS some dozen.
MAX_CONTROL_BYTES: Final = 1 << 20

_HEAD: Final = 8
_CONTROL_BIT: Final = 0x8000
_ID_MASK: Final = 0x7FFF_FFFF
_MAX_LENGTH: Final = (1 << 24) - 1


class Type(enum.IntEnum):
    SYN_STREAM = 1
    SYN_REPLY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    HEADERS = 8
    WINDOW_UPDATE = 9


class Status(enum.IntEnum):
    """Why a stream was reset."""

    PROTOCOL_ERROR = 1
    INVALID_STREAM = 2
    REFUSED_STREAM = 3
    CANCEL = 5
    INTERNAL_ERROR = 6
    STREAM_IN_USE = 8
    STREAM_ALREADY_CLOSED = 9


class GoAwayStatus(enum.IntEnum):
    OK = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2


class SpdyError(Exception):
    """The peer broke the protocol; the connection must end."""


@dataclass(frozen=True, slots=True)
class DataPiece:
    """Bytes of a data frame. `fin` is on its last piece, which may be empty."""

    stream: int
    data: bytes
    fin: bool


@dataclass(frozen=True, slots=True)
class SynStream:
    stream: int
    block: bytes
    fin: bool


@dataclass(frozen=True, slots=True)
class SynReply:
    stream: int
    block: bytes
    fin: bool


@dataclass(frozen=True, slots=True)
class Headers:
    stream: int
    block: bytes
    fin: bool


@dataclass(frozen=True, slots=True)
class RstStream:
    stream: int
    status: int


@dataclass(frozen=True, slots=True)
class Ping:
    id: int


@dataclass(frozen=True, slots=True)
class GoAway:
    last_stream: int
    status: int


@dataclass(frozen=True, slots=True)
class Ignored:
    """SETTINGS, WINDOW_UPDATE and unknown types, which must be ignored. Flow control is omitted, because Kubernetes'
    clients neither send nor obey it."""

    type: int


Frame = DataPiece | SynStream | SynReply | Headers | RstStream | Ping | GoAway | Ignored


class Decoder:
    def __init__(self) -> None:
        self._buffer = bytearray()
        self._stream = 0  # of the current data frame
        self._left = 0
        self._fin = False
        self._in_data = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes. Raises SpdyError."""
        self._buffer += data
        while True:
            frame = self._rest_of_data() if self._in_data else self._next()
            if frame is None:
                return
            yield frame

    def _rest_of_data(self) -> DataPiece | None:
        if self._left and not self._buffer:
            return None
        piece = bytes(self._buffer[: self._left])
        del self._buffer[: len(piece)]
        self._left -= len(piece)
        self._in_data = self._left > 0
        return DataPiece(self._stream, piece, self._fin and not self._in_data)

    def _next(self) -> Frame | None:
        if len(self._buffer) < _HEAD:
            return None
        first, second = struct.unpack_from(">II", self._buffer)
        flags, length = second >> 24, second & _MAX_LENGTH
        if not first >> 31:
            del self._buffer[:_HEAD]
            self._stream, self._left, self._fin, self._in_data = first & _ID_MASK, length, bool(flags & FLAG_FIN), True
            return self._rest_of_data()
        version = (first >> 16) & 0x7FFF
        if version != VERSION:
            raise SpdyError(f"control frame of SPDY version {version}; only {VERSION} is supported")
        if length > MAX_CONTROL_BYTES:
            raise SpdyError(f"control frame of {length} bytes; {MAX_CONTROL_BYTES} at most")
        if len(self._buffer) < _HEAD + length:
            return None
        payload = bytes(self._buffer[_HEAD : _HEAD + length])
        del self._buffer[: _HEAD + length]
        return _control(first & 0xFFFF, flags, payload)


def _control(kind: int, flags: int, payload: bytes) -> Frame:
    fin = bool(flags & FLAG_FIN)
    match kind:
        case Type.SYN_STREAM:
            stream, _associated, _priority, _slot = _numbers(">IIBB", kind, payload)
            return SynStream(stream & _ID_MASK, payload[10:], fin)
        case Type.SYN_REPLY:
            return SynReply(_numbers(">I", kind, payload)[0] & _ID_MASK, payload[4:], fin)
        case Type.HEADERS:
            return Headers(_numbers(">I", kind, payload)[0] & _ID_MASK, payload[4:], fin)
        case Type.RST_STREAM:
            stream, status = _numbers(">II", kind, payload, exact=True)
            return RstStream(stream & _ID_MASK, status)
        case Type.PING:
            return Ping(_numbers(">I", kind, payload, exact=True)[0])
        case Type.GOAWAY:
            stream, status = _numbers(">II", kind, payload, exact=True)
            return GoAway(stream & _ID_MASK, status)
        case _:
            return Ignored(kind)


def _numbers(layout: str, kind: int, payload: bytes, *, exact: bool = False) -> tuple[int, ...]:
    size = struct.calcsize(layout)
    if len(payload) < size or (exact and len(payload) != size):
        raise SpdyError(f"{Type(kind).name} frame of {len(payload)} bytes; expected {size}")
    return struct.unpack_from(layout, payload)


# --- writing


def _encode(kind: Type, payload: bytes) -> bytes:
    head = struct.pack(">HHI", _CONTROL_BIT | VERSION, kind, len(payload))
    return head + payload


def data(stream: int, payload: bytes, *, fin: bool = False) -> bytes:
    """`payload`: less than 16 MiB."""
    return struct.pack(">II", stream, (FLAG_FIN if fin else 0) << 24 | len(payload)) + payload


def syn_reply(stream: int, block: bytes) -> bytes:
    return _encode(Type.SYN_REPLY, struct.pack(">I", stream) + block)


def rst_stream(stream: int, status: Status) -> bytes:
    return _encode(Type.RST_STREAM, struct.pack(">II", stream, status))


def ping(number: int) -> bytes:
    return _encode(Type.PING, struct.pack(">I", number))


def goaway(last_stream: int, status: GoAwayStatus) -> bytes:
    return _encode(Type.GOAWAY, struct.pack(">II", last_stream, status))
