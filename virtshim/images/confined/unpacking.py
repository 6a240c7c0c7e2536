"""A layer's bytes on their way from their frames to the tar reader: unpacked, and no more of them than may be. Pure."""

from __future__ import annotations

import lzma
import sys
from collections.abc import Callable, Generator, Iterator
from typing import cast

from zlib_ng import zlib_ng

from virtshim.domain.errors import InvalidRequest
from virtshim.images.confined.frames import ALWAYS, RATIO

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"
# Frames that a decoder skips; estargz's and zstd:chunked's tables of contents are in such.
_ZSTD_SKIPPED = b"\x2a\x4d\x18"
_LONGEST_MAGIC = 6
_PIECE = 1 << 20
_XZ_MEMORY = 256 << 20

_BROKEN = (lzma.LZMAError, zstd.ZstdError)
# A class, whatever its stub says.
_BAD_GZIP = cast("type[Exception]", zlib_ng.error)


class Inflation:
    """How much became of how much, in all layers of an image."""

    __slots__ = ("packed", "plain")

    def __init__(self) -> None:
        self.packed = self.plain = 0

    def is_too_much(self) -> bool:
        return self.plain > ALWAYS and self.plain > RATIO * self.packed


def unpacked(chunks: Iterator[bytes], what: str, inflation: Inflation) -> Iterator[bytes]:
    """The plain bytes of what is plain, gzip, xz or zstd, told apart by its first bytes as other runtimes do. Raises
    InvalidRequest for what is damaged, or unpacks to far more than anybody packs."""
    for piece in _unpacked(_counted(chunks, inflation), what):
        inflation.plain += len(piece)
        if inflation.is_too_much():
            raise InvalidRequest(
                f"{what} unpacks, with those above it, to more than {RATIO} times their size and {ALWAYS >> 30} GiB; "
                "push the disk as qcow2"
            )
        yield piece


def _counted(chunks: Iterator[bytes], inflation: Inflation) -> Iterator[bytes]:
    for chunk in chunks:
        inflation.packed += len(chunk)
        yield chunk


def _unpacked(chunks: Iterator[bytes], what: str) -> Iterator[bytes]:
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= _LONGEST_MAGIC:
            break
    if head.startswith(_GZIP):
        yield from _gunzip(head, chunks, what)
    elif head.startswith(_XZ):
        yield from _decoded(head, chunks, _xz_decoder, f"{what} is damaged: its xz data")
    elif head.startswith(_ZSTD) or (head[1:4] == _ZSTD_SKIPPED and head[0] & 0xF0 == 0x50):
        yield from _decoded(head, chunks, zstd.ZstdDecompressor, f"{what} is damaged: its zstd data")
    else:
        if head:
            yield head
        yield from chunks


def _xz_decoder() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY)


def _decoded(
    head: bytes, chunks: Iterator[bytes], make: Callable[[], lzma.LZMADecompressor | zstd.ZstdDecompressor], data: str
) -> Iterator[bytes]:
    """One or more streams; never more than a piece of output in memory at once."""
    rest: bytes = head
    while rest:
        decoder = make()
        while not decoder.eof:
            try:
                piece = decoder.decompress(rest, _PIECE)
            except _BROKEN as exc:
                raise InvalidRequest(f"{data} cannot be unpacked ({exc}); push the image again") from exc
            rest = b""
            if piece:
                yield piece
            elif decoder.needs_input and not decoder.eof:
                rest = next(chunks, b"")
                if not rest:
                    raise InvalidRequest(f"{data} is cut short; push the image again")
        rest = _padding_left(decoder.unused_data, chunks)


def _padding_left(rest: bytes, chunks: Iterator[bytes]) -> bytes:
    """What follows the zeros behind a stream, from its first byte on: xz and gzip(1) allow them. b"" if nothing does."""
    while not (rest := rest.lstrip(b"\0")):
        if not (rest := next(chunks, b"")):
            break
    return rest


def limited(chunks: Iterator[bytes], limit: int, what: str) -> Iterator[bytes]:
    """Raises InvalidRequest when more than `limit` bytes come: a small layer may unpack to an endless one."""
    seen = 0
    for chunk in chunks:
        seen += len(chunk)
        if seen > limit:
            raise InvalidRequest(f"{what} unpacks to more than {limit} bytes, this node's limit (images.max_bytes)")
        yield chunk


def _gunzip(head: bytes, chunks: Iterator[bytes], what: str) -> Iterator[bytes]:
    """One or more gzip members; never more than a piece of output in memory at once."""
    rest: bytes = head
    while rest:
        rest = _padding_left((yield from _gunzip_member(rest, chunks, what)), chunks)


def _gunzip_member(data: bytes, chunks: Iterator[bytes], what: str) -> Generator[bytes, None, bytes]:
    """Yields what one member holds, returns what was read beyond it."""
    inflater = zlib_ng.decompressobj(wbits=zlib_ng.MAX_WBITS | 16)
    while True:
        try:
            piece = inflater.decompress(data, _PIECE)
        except _BAD_GZIP as exc:
            raise InvalidRequest(f"{what} is damaged: its gzip data cannot be unpacked; push the image again") from exc
        if piece:
            yield piece
        if inflater.eof:
            return inflater.unused_data
        data = inflater.unconsumed_tail
        # A full piece may leave output inside the inflater though all input is used: ask again before reading on.
        if not data and len(piece) < _PIECE:
            data = next(chunks, b"")
            if not data:
                raise InvalidRequest(f"{what} is damaged: its gzip data is cut short; push the image again")
