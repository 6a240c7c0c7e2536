"""Netlink by hand, for messages that pyroute2 has no words for: attributes, and one exchange with the kernel."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

NESTED = 0x8000
REQUEST, ACK = 1, 4
_ERROR = 2
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
    found = []
    at = 0
    while at + 16 <= len(data):
        length, kind = struct.unpack_from("=IH", data, at)
        if length < 16:
            break
        if kind == _ERROR and at + 20 <= len(data):
            found.append(-struct.unpack_from("=i", data, at + 16)[0])
        at += length + (-length % 4)
    return found


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
