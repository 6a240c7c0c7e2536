"""Raw netlink, for messages that pyroute2 does not support or is too slow for: attributes, and exchanges with the kernel."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence

Attributes = Mapping[int, bytes]

NESTED = 0x8000
REQUEST, ACK = 1, 4
_DUMP = 0x300
_INTERRUPTED = 0x10  # the list changed during the dump
_ERROR, _DONE = 2, 3
_KIND = 0x3FFF  # of an attribute, without its flags
_TRIES = 5
_TIMEOUT = 5.0  # seconds; the kernel normally answers at once


def attribute(kind: int, data: bytes) -> bytes:
    padding = -len(data) % 4
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * padding


def nested(kind: int, *inner: bytes) -> bytes:
    return attribute(kind | NESTED, b"".join(inner))


def message(kind: int, flags: int, sequence: int, payload: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(payload), kind, flags, sequence, 0) + payload


def errors_in(data: bytes) -> list[int]:
    """The errno (0: acknowledged) of each NLMSG_ERROR message in the kernel's answer."""
    return [
        -struct.unpack_from("=i", payload)[0]
        for kind, _, payload in _messages(data)
        if kind == _ERROR and len(payload) >= 4
    ]


def exchange(protocol: int, batch: bytes, acknowledgements: int) -> Iterator[int]:
    """Sends the batch, in the thread's namespace. Yields the errno of each acknowledgement, 0 for success. After an error
    there may be no further acknowledgements. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as sock:
        sock.settimeout(_TIMEOUT)
        sock.bind((0, 0))
        sock.send(batch)
        seen = 0
        while seen < acknowledgements:
            for code in errors_in(sock.recv(65536)):
                seen += 1
                yield code


def attributes(data: bytes, at: int) -> Attributes:
    """The attributes from `at` on, by kind; of several of the same kind, the last."""
    found = {}
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            break
        found[kind & _KIND] = data[at + 4 : at + length]
        at += length + (-length % 4)
    return found


def number(of: Attributes, kind: int) -> int:
    """A number of four bytes; 0 without the attribute."""
    data = of.get(kind, b"")
    return int(struct.unpack("=I", data)[0]) if len(data) == 4 else 0


def text(of: Attributes, kind: int) -> str:
    """ "" without the attribute."""
    return of.get(kind, b"").rstrip(b"\0").decode(errors="replace")


def dump(kind: int, head: bytes, protocol: int = socket.NETLINK_ROUTE) -> Sequence[bytes]:
    """The payloads of the kernel's answer to a dump request, in the thread's namespace. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as sock:
        sock.settimeout(_TIMEOUT)
        sock.bind((0, 0))
        for _ in range(_TRIES):
            sock.send(message(kind, REQUEST | _DUMP, 1, head))
            told = _until_done(sock)
            if told is not None:
                return told
    raise InterruptedError("the list changed during each attempt to read it")


def _until_done(sock: socket.socket) -> Sequence[bytes] | None:
    """Reads until the end; None if the dump must be repeated."""
    found: list[bytes] = []
    interrupted = False
    while True:
        for kind, flags, payload in _messages(sock.recv(1 << 18)):
            if kind == _ERROR:
                code = -struct.unpack_from("=i", payload)[0]
                raise OSError(code, os.strerror(code))
            interrupted = interrupted or bool(flags & _INTERRUPTED)
            if kind == _DONE:
                return None if interrupted else found
            found.append(payload)


def _messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    at = 0
    while at + 16 <= len(data):
        length, kind, flags = struct.unpack_from("=IHH", data, at)
        if length < 16:
            break
        yield kind, flags, data[at + 16 : at + length]
        at += length + (-length % 4)
