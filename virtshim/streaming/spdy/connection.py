"""The server's side of a SPDY/3.1 connection: the states of its streams. No I/O.

    arriving(bytes) -> events       what the client did, frame by frame; `receive`: all at once
    reply, data, reset, goaway      what we do
    output() -> bytes               what must be sent now, including answers to PING

If a client breaks the protocol, `arriving` and `receive` raise SpdyError, and `output` has a GOAWAY. Nothing may be received
afterwards.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from virtshim.streaming.spdy import frames
from virtshim.streaming.spdy.frames import GoAwayStatus, SpdyError, Status

# The zlib dictionary of SPDY/3 header blocks (SPDY Protocol, Draft 3, section 2.6.10.1): 1423 bytes, Adler-32
# e3c6a7c2.

_WORDS = (
    "options,head,post,put,delete,trace,accept,accept-charset,accept-encoding,accept-language,"
    "accept-ranges,age,allow,authorization,cache-control,connection,content-base,content-encoding,"
    "content-language,content-length,content-location,content-md5,content-range,content-type,date,etag,"
    "expect,expires,from,host,if-match,if-modified-since,if-none-match,if-range,if-unmodified-since,"
    "last-modified,location,max-forwards,pragma,proxy-authenticate,proxy-authorization,range,referer,"
    "retry-after,server,te,trailer,transfer-encoding,upgrade,user-agent,vary,via,warning,"
    "www-authenticate,method,get,status,200 OK,version,HTTP/1.1,url,public,set-cookie,keep-alive,origin"
)

_TAIL = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 "
    "Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 "
    "Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar"
    " Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/ht"
    "ml,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,text/javascript,pu"
    "blicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)


def _counted(word: str) -> bytes:
    return len(word).to_bytes(4, "big") + word.encode("ascii")


DICTIONARY = b"".join(_counted(word) for word in _WORDS.split(",")) + _TAIL.encode("ascii")


# Header blocks are names and values, compressed with one zlib context per direction for the whole connection. So every
# block that arrives must be unpacked, even if nobody needs it.

# Kubernetes' clients have three headers, of some hundred bytes. A block may unpack to a thousand times its size, and all sessions
# wait meanwhile.
MAX_HEADERS: Final = 100
MAX_BYTES: Final = 8 << 10


class HeaderReader:
    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)

    def read(self, block: bytes) -> dict[str, str]:
        """Raises SpdyError. Never unpacks more than MAX_BYTES."""
        try:
            plain = self._inflate.decompress(block, MAX_BYTES + 1)
        except zlib.error as exc:
            raise SpdyError(f"header block cannot be unpacked: {exc}") from exc
        if len(plain) > MAX_BYTES or self._inflate.unconsumed_tail:
            raise SpdyError(f"header block unpacks to more than {MAX_BYTES} bytes")
        if self._inflate.eof:
            raise SpdyError("the compressed header stream has ended")
        return _parse(plain)


class HeaderWriter:
    def __init__(self) -> None:
        self._deflate = zlib.compressobj(zdict=DICTIONARY)

    def write(self, headers: Mapping[str, str]) -> bytes:
        """Names must be lower case."""
        plain = [struct.pack(">I", len(headers))]
        for text in (part for item in headers.items() for part in item):
            raw = text.encode("latin-1")
            plain += [struct.pack(">I", len(raw)), raw]
        return self._deflate.compress(b"".join(plain)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)


def _parse(plain: bytes) -> dict[str, str]:
    """Names are in lower case, as they should be on the wire. Several values of a name stay joined by NUL."""
    count, at = _number(plain, 0)
    if count > MAX_HEADERS:
        raise SpdyError(f"{count} headers; {MAX_HEADERS} at most")
    headers: dict[str, str] = {}
    for _ in range(count):
        name, at = _text(plain, at)
        value, at = _text(plain, at)
        if not name or name.lower() in headers:
            raise SpdyError("a header without a name, or one given twice")
        headers[name.lower()] = value
    if at != len(plain):
        raise SpdyError("trailing bytes after the last header")
    return headers


def _number(plain: bytes, at: int) -> tuple[int, int]:
    if len(plain) < at + 4:
        raise SpdyError("header block is cut short")
    return int.from_bytes(plain[at : at + 4], "big"), at + 4


def _text(plain: bytes, at: int) -> tuple[str, int]:
    length, at = _number(plain, at)
    if len(plain) < at + length:
        raise SpdyError("header block is cut short")
    return plain[at : at + length].decode("latin-1"), at + length


# Headers of Kubernetes' clients. All others are dropped, because they may be large and would be kept as long as the stream.
_KEPT: Final = frozenset(("streamtype", "port", "requestid"))
_LONGEST: Final = 256


@dataclass(frozen=True, slots=True)
class Opened:
    """Must be answered by `reply` or `reset`. `headers`: the stream's kind, port and request."""

    stream: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Received:
    """Never empty."""

    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class HalfClosed:
    """The client sends no more on this stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class Reset:
    """The client wants no more of this stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class GoneAway:
    """The client opens no more streams."""


Event = Opened | Received | HalfClosed | Reset | GoneAway


@dataclass(slots=True)
class _State:
    """Which halves are still open."""

    client: bool = True
    server: bool = True


class SpdyConnection:
    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._decoder = frames.Decoder()
        self._reader = HeaderReader()
        self._writer = HeaderWriter()
        self._streams: dict[int, _State] = {}
        self._last = 0
        self._leaving = False
        self._broken: SpdyError | None = None
        self._out: list[bytes] = []

    # --- from the client

    def receive(self, data: bytes) -> list[Event]:
        """Raises SpdyError; the events before the mistake are lost with the connection."""
        return [event for events in self.arriving(data) for event in events]

    def arriving(self, data: bytes) -> Iterator[list[Event]]:
        """Yields the events frame by frame, so that the caller can do other work in between."""
        if self._broken is not None:
            raise self._broken
        try:
            for frame in self._decoder.feed(data):
                yield self._take(frame)
        except SpdyError as exc:
            self._broken = exc
            self._out.append(frames.goaway(self._last, GoAwayStatus.PROTOCOL_ERROR))
            raise

    def _take(self, frame: frames.Frame) -> list[Event]:
        match frame:
            case frames.DataPiece():
                return self._data(frame)
            case frames.SynStream():
                return self._opened(frame)
            case frames.Headers():
                self._reader.read(frame.block)
                return self._client_done(frame.stream) if frame.fin else []
            case frames.RstStream():
                return [Reset(frame.stream)] if self._streams.pop(frame.stream, None) else []
            case frames.Ping():
                if frame.id % 2:  # our own would be even
                    self._out.append(frames.ping(frame.id))
                return []
            case frames.GoAway():
                return [GoneAway()]
            case frames.SynReply():
                raise SpdyError("SYN_REPLY for a stream that the server did not open")
            case frames.Ignored():
                return []

    def _opened(self, frame: frames.SynStream) -> list[Event]:
        headers = self._reader.read(frame.block)
        if frame.stream % 2 == 0 or frame.stream <= self._last:
            raise SpdyError(f"stream id {frame.stream} after {self._last}: ids must be odd and rising")
        self._last = frame.stream
        kept = {name: value for name, value in headers.items() if name in _KEPT}
        if self._leaving or len(self._streams) >= self._max_streams or any(len(v) > _LONGEST for v in kept.values()):
            self._out.append(frames.rst_stream(frame.stream, Status.REFUSED_STREAM))
            return []
        self._streams[frame.stream] = _State()
        opened: list[Event] = [Opened(frame.stream, kept)]
        return opened + (self._client_done(frame.stream) if frame.fin else [])

    def _data(self, frame: frames.DataPiece) -> list[Event]:
        state = self._streams.get(frame.stream)
        if state is None:
            # Data for a stream that has just ended is normal, but not for one that was never opened.
            if frame.stream % 2 == 0 or frame.stream > self._last:
                raise SpdyError(f"data for stream {frame.stream}, which was never opened")
            return []
        if not state.client:
            self.reset(frame.stream, Status.STREAM_ALREADY_CLOSED)
            return [Reset(frame.stream)]
        events: list[Event] = [Received(frame.stream, frame.data)] if frame.data else []
        return events + (self._client_done(frame.stream) if frame.fin else [])

    def _client_done(self, stream: int) -> list[Event]:
        state = self._streams.get(stream)
        if state is None or not state.client:
            return []
        state.client = False
        self._forget_if_closed(stream, state)
        return [HalfClosed(stream)]

    def _forget_if_closed(self, stream: int, state: _State) -> None:
        if not (state.client or state.server):
            del self._streams[stream]

    # --- to the client; data for a stream that is gone is dropped

    def reply(self, stream: int) -> None:
        """Accepts an opened stream; the client waits for this."""
        if stream in self._streams:
            self._out.append(frames.syn_reply(stream, self._writer.write({})))

    def writable(self, stream: int) -> bool:
        state = self._streams.get(stream)
        return state is not None and state.server

    def known(self, stream: int) -> bool:
        """Whether at least one direction is open."""
        return stream in self._streams

    def data(self, stream: int, payload: bytes, *, fin: bool = False) -> None:
        """`fin`: ends our output on this stream."""
        state = self._streams.get(stream)
        if state is None or not state.server:
            return
        self._out.append(frames.data(stream, payload, fin=fin))
        if fin:
            state.server = False
            self._forget_if_closed(stream, state)

    def reset(self, stream: int, status: Status) -> None:
        if self._streams.pop(stream, None):
            self._out.append(frames.rst_stream(stream, status))

    def goaway(self, status: GoAwayStatus = GoAwayStatus.OK) -> None:
        """Refuses new streams from now on."""
        if not self._leaving:
            self._leaving = True
            self._out.append(frames.goaway(self._last, status))

    def output(self) -> bytes:
        out, self._out = b"".join(self._out), []
        return out
