"""A layer's bytes on their way from their frames to the tar reader: unpacked, and no more of them than may be. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator

from virtshim.domain.errors import InvalidRequest

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_PIECE = 1 << 20


def unpacked(chunks: Iterator[bytes], what: str) -> Iterator[bytes]:
    """The plain tar bytes of a layer that is plain or gzip, told apart by its first bytes as other runtimes do."""
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= len(_ZSTD):
            break
    if head.startswith(_ZSTD):
        raise InvalidRequest(
            f"{what} is compressed with zstd, which is not supported; push it with gzip or uncompressed"
        )
    if head.startswith(_GZIP):
        yield from _gunzip(head, chunks, what)
        return
    if head:
        yield head
    yield from chunks


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
        if rest[0] == 0:
            # Padding after the last member, as gzip(1) allows.
            for _ in chunks:
                pass
            return
        rest = yield from _gunzip_member(rest, chunks, what)
        rest = rest or next(chunks, b"")


def _gunzip_member(data: bytes, chunks: Iterator[bytes], what: str) -> Generator[bytes, None, bytes]:
    """Yields what one member holds, returns what was read beyond it."""
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    while True:
        try:
            piece = inflater.decompress(data, _PIECE)
        except zlib.error as exc:
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
