"""Netlink by hand, for messages that pyroute2 has no words for: attributes, and one exchange with the kernel."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence

Attributes = Mapping[int, bytes]

NESTED = 0x8000
REQUEST, ACK = 1, 4
_DUMP = 0x300
_INTERRUPTED = 0x10  # the list changed while it was told
_ERROR, _DONE = 2, 3
_KIND = 0x3FFF  # of an attribute, without its flags
_TRIES = 5
_TIMEOUT = 5.0  # seconds; the kernel answers while it is asked


def attribute(kind: int, data: bytes) -> bytes:
    padding = -len(data) % 4
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * padding


def nested(kind: int, *inner: bytes) -> bytes:
    return attribute(kind | NESTED, b"".join(inner))


def message(kind: int, flags: int, sequence: int, payload: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(payload), kind, flags, sequence, 0) + payload


def errors_in(data: bytes) -> list[int]:
    """The errno (0: acknowledged) of each NLMSG_ERROR message in what the kernel answered."""
    return [
        -struct.unpack_from("=i", payload)[0]
        for kind, _, payload in _messages(data)
        if kind == _ERROR and len(payload) >= 4
    ]


def exchange(protocol: int, batch: bytes, acknowledgements: int) -> Iterator[int]:
    """Sends it; the errno of each of so many acknowledgements as it comes, 0 for done. The first that is not may be the last to
    come. In the namespace of the thread. Raises OSError."""
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
    """Those from `at` on, by kind; of several of one kind the last."""
    found = {}
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            break
        found[kind & _KIND] = data[at + 4 : at + length]
        at += length + (-length % 4)
    return found


def dump(kind: int, head: bytes, protocol: int = socket.NETLINK_ROUTE) -> Sequence[bytes]:
    """Payloads of all that the kernel tells to a request for a list. In the namespace of the thread. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as sock:
        sock.settimeout(_TIMEOUT)
        sock.bind((0, 0))
        for _ in range(_TRIES):
            sock.send(message(kind, REQUEST | _DUMP, 1, head))
            told = _until_done(sock)
            if told is not None:
                return told
    raise InterruptedError("the list changed each time it was read")


def _until_done(sock: socket.socket) -> Sequence[bytes] | None:
    """None if it is to be asked for again."""
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
