"""SPDY/3 header blocks: names and values, compressed with one zlib context a direction for the whole connection. Pure.

Every block that arrives must be unpacked, also one that nobody wants: the context goes on from it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Final

from virtshim.streaming.spdy.dictionary import DICTIONARY
from virtshim.streaming.spdy.frames import SpdyError

# Clients of Kubernetes have three, of some hundred bytes. A block may unpack to a thousand times its size, and all sessions wait
# meanwhile.
MAX_HEADERS: Final = 100
MAX_BYTES: Final = 8 << 10


class HeaderReader:
    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)

    def read(self, block: bytes) -> dict[str, str]:
        """Raises SpdyError. Never more than MAX_BYTES are unpacked, whatever the block says."""
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
    """Names in lower case, as they should be on the wire; several values of one name stay joined by NUL."""
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
