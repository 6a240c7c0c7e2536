"""A connection between two nodes: frames of JSON, errors, and files in chunks.

A frame is a byte that says its kind, the length of its content in four bytes, and the content. A file is chunks and an end mark
with the number of bytes: the end of the connection is never the end of a file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

from virtshim.model import errors
from virtshim.model.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PermissionRefused,
    ResourceExhausted,
    ShimError,
    Unavailable,
)
from virtshim.model.text import escaped
from virtshim.peers.certificates import reason

_HEAD: Final = struct.Struct("!cI")
_COUNT: Final = struct.Struct("!Q")
_MESSAGE, _ERROR, _CHUNK, _END = b"M", b"E", b"C", b"Z"
_LONGEST: Final = {_MESSAGE: 1 << 20, _ERROR: 64 << 10, _CHUNK: 1 << 20, _END: _COUNT.size}
_MOST_TEXT: Final = 8000
# Seconds: to send an error, and for the peer to read it.
_REFUSE: Final = 5.0
_LINGER: Final = 2.0
# What TLS works on at once; it fits into a processor's cache.
_PIECE: Final = 128 << 10
# The error classes by kind. Only those of this module, because others may take more arguments than a text.
_CLASSES: Final = {
    one.kind.value: one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, ShimError)
}
# OpenSSL's words for a peer that does not like our certificate. In TLS 1.3 we learn it when we read for the first time.
_OF_CERTIFICATE: Final = ("CERT", "UNKNOWN_CA", "ACCESS_DENIED")


# A node that is gone is noticed within 20 s, however long the wait for its next frame may be.
_OPTIONS: Final = (
    ((socket.IPPROTO_TCP, socket.TCP_NODELAY), 1),
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 5),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 5),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 3),
    ((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), 20_000),
)


class TlsLink:
    """Implements `virtshim.peers.ports.PeerLink` on a connected socket, whose owner closes it. TLS works in memory, beside the
    socket: Python's own TLS socket makes two system calls for each 16 KiB, and sends plain text after its shutdown."""

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self.peer = "?"
        self._socket = connected
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=is_server)
        self._raw = memoryview(bytearray(_PIECE))
        self._is_whole = True  # whether the last frame was sent to its end
        self._has_refused = False

    def handshake(self, timeout: float) -> dict[str, Any]:
        """Comes first. Returns the peer's verified certificate, and the caller sets `peer`. Raises OSError."""
        until = time.monotonic() + timeout
        for option, value in _OPTIONS:
            self._socket.setsockopt(*option, value)
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(until)
                self._fill(until)
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush(until)  # tells the peer why
                raise
            else:
                self._flush(until)
                return self._tls.getpeercert() or {}

    def send(self, message: Mapping[str, object], timeout: float) -> None:
        self._send(_framed(_MESSAGE, message), timeout)

    def receive(self, timeout: float) -> dict[str, Any]:
        until = time.monotonic() + timeout
        kind, size = self._head(until)
        if kind != _MESSAGE:
            raise self._malformed("data where a message should be")
        return self._json(size, until)

    def refuse(self, error: ShimError) -> None:
        if self._is_whole:
            self._has_refused = True
            with contextlib.suppress(ShimError):
                told = {"kind": error.kind.value, "text": str(error)[:_MOST_TEXT]}
                self._send(_framed(_ERROR, told), _REFUSE)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._has_refused:
                self._linger()
            self._socket.shutdown(socket.SHUT_RDWR)

    # --- files

    def send_file(self, source: int, idle: float) -> int:
        frame = memoryview(bytearray(_HEAD.size + _LONGEST[_CHUNK]))
        content, total = frame[_HEAD.size :], 0
        while count := self._next(source, content, idle):
            _HEAD.pack_into(frame, 0, _CHUNK, count)
            self._send(frame[: _HEAD.size + count], idle)
            total += count
        self._send(_HEAD.pack(_END, _COUNT.size) + _COUNT.pack(total), idle)
        return total

    def receive_file(self, sink: int, most: int, idle: float) -> int:
        content, total = memoryview(bytearray(_LONGEST[_CHUNK])), 0
        with _not_blocking(sink):
            while True:
                until = time.monotonic() + idle
                kind, size = self._head(until)
                if kind == _END:
                    return self._ended(size, total, until)
                if kind != _CHUNK or not size:
                    raise self._malformed("a message or an empty chunk within a file")
                total += size
                if total > most:
                    raise self._malformed(f"a file of more than {most} bytes")
                self._read(content[:size], until)
                self._store(sink, content[:size], idle)

    def _next(self, source: int, content: memoryview, idle: float) -> int:
        """Reads a chunk from the source. Meanwhile listens to the peer, which sends something here only to refuse."""
        waiting = select.poll()
        waiting.register(source, select.POLLIN)
        waiting.register(self._socket, select.POLLIN)
        ready = [descriptor for descriptor, _ in waiting.poll(idle * 1000)]
        if self._socket.fileno() in ready or self._arrived.pending or self._tls.pending():
            self._head(time.monotonic() + idle)
            raise self._malformed("a frame while it receives a file")
        if not ready:
            raise DeadlineExceeded(f"there was nothing to send to node {self.peer} for {idle:g} s")
        try:
            return os.readv(source, [content])
        except OSError as exc:
            raise InternalError(f"what node {self.peer} is to receive cannot be read: {exc.strerror}") from exc

    def _store(self, sink: int, content: memoryview, idle: float) -> None:
        while content:
            try:
                content = content[os.write(sink, content) :]
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(sink, select.POLLOUT)
                if not waiting.poll(idle * 1000):
                    raise DeadlineExceeded(f"what node {self.peer} sends was not taken for {idle:g} s") from None
            except OSError as exc:
                is_full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
                kind = ResourceExhausted if is_full else InternalError
                raise kind(f"what node {self.peer} sends cannot be written: {exc.strerror}") from exc

    def _ended(self, size: int, total: int, until: float) -> int:
        if size != _COUNT.size or (said := _COUNT.unpack(self._bytes(size, until))[0]) != total:
            raise self._malformed(f"an end mark that does not fit {total} bytes")
        return int(said)

    # --- frames

    def _head(self, until: float) -> tuple[bytes, int]:
        """Kind and length of the next frame. An error is raised."""
        kind, size = _HEAD.unpack(self._bytes(_HEAD.size, until))
        if kind not in _LONGEST:
            raise self._malformed("a frame of no known kind")
        if size > _LONGEST[kind]:
            raise self._malformed(f"a frame of {size} bytes")
        if kind == _ERROR:
            self._raise(self._json(size, until))
        return kind, size

    def _raise(self, told: dict[str, Any]) -> NoReturn:
        kind, text = told.get("kind"), told.get("text")
        if not isinstance(kind, str) or not isinstance(text, str):
            raise self._malformed("an error without kind and text")
        raise _CLASSES.get(kind, InternalError)(f"node {self.peer}: {escaped(text, _MOST_TEXT)}")

    def _json(self, size: int, until: float) -> dict[str, Any]:
        text = self._bytes(size, until)
        try:
            found = json.loads(text.decode(), object_pairs_hook=_each_once, parse_constant=_no_number)
        except (ValueError, RecursionError) as exc:
            raise self._malformed(f"bad JSON ({escaped(str(exc), 100)})") from exc
        if not isinstance(found, dict):
            raise self._malformed("JSON that is not an object")
        return found

    def _malformed(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"node {self.peer}: sent {what}; do both nodes have the same version of virtshim?")

    # --- bytes

    def _bytes(self, size: int, until: float) -> bytearray:
        found = bytearray(size)
        self._read(memoryview(found), until)
        return found

    def _read(self, into: memoryview, until: float) -> None:
        with self._explained():
            while into:
                try:
                    count: Any = self._tls.read(len(into), into)  # the number, because there is a buffer
                except ssl.SSLWantReadError:
                    self._flush(until)
                    self._fill(until)
                else:
                    if not count:
                        raise ConnectionResetError
                    into = into[count:]

    def _send(self, frame: bytes | memoryview, timeout: float) -> None:
        self._is_whole = False
        with self._explained():
            until, left = time.monotonic() + timeout, memoryview(frame)
            while left:
                left = left[self._tls.write(left[:_PIECE]) :]
                self._flush(until)
        self._is_whole = True

    def _fill(self, until: float) -> None:
        self._socket.settimeout(_left(until))
        count = self._socket.recv_into(self._raw)
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, "it was closed")
        self._arrived.write(self._raw[:count])

    def _flush(self, until: float) -> None:
        if self._leaving.pending:
            self._socket.settimeout(_left(until))
            self._socket.sendall(self._leaving.read())

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as exc:
            raise Unavailable(f"node {self.peer}: is too slow, or cannot be reached any more") from exc
        except (ConnectionResetError, BrokenPipeError) as exc:
            raise Unavailable(f"node {self.peer}: closed the connection") from exc
        except OSError as exc:
            if isinstance(exc, ssl.SSLError) and any(word in (exc.reason or "") for word in _OF_CERTIFICATE):
                raise PermissionRefused(
                    f"node {self.peer}: refuses this node's certificate: {reason(exc)}; its log has the reason"
                ) from exc
            raise Unavailable(f"node {self.peer}: the connection broke: {reason(exc)}") from exc

    def _linger(self) -> None:
        """Lets the peer read the error: closing now would reset the connection if there are unread bytes."""
        until = time.monotonic() + _LINGER
        self._socket.shutdown(socket.SHUT_WR)
        while (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            if not self._socket.recv_into(self._raw):
                return


def _framed(kind: bytes, message: Mapping[str, object]) -> bytes:
    text = json.dumps(message, allow_nan=False).encode()
    if len(text) > _LONGEST[kind]:
        raise InvalidRequest(f"a message of {len(text)} bytes is too long for another node")
    return _HEAD.pack(kind, len(text)) + text


def _left(until: float) -> float:
    """The seconds that are left. Raises TimeoutError, even if the peer keeps sending single bytes."""
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError("the time is over")
    return left


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


@contextlib.contextmanager
def _not_blocking(descriptor: int) -> Iterator[None]:
    before = os.get_blocking(descriptor)
    os.set_blocking(descriptor, False)
    try:
        yield
    finally:
        os.set_blocking(descriptor, before)
