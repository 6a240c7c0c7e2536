"""PNG files of pictures in 24-bit colour. Pure. The format: W3C, "Portable Network Graphics"."""

from __future__ import annotations

import struct
import zlib
from typing import Final

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
# Bits a sample, and the number of colour with no alpha; then deflate, the only filter method, no interlace.
_RGB: Final = (8, 2, 0, 0, 0)


def encoded(width: int, height: int, pixels: bytes) -> bytes:
    """`pixels`: red, green and blue, a byte each, row by row."""
    row = width * 3
    rows = b"".join(b"\0" + pixels[start : start + row] for start in range(0, row * height, row))
    return b"".join(
        (
            _SIGNATURE,
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, *_RGB)),
            _chunk(b"IDAT", zlib.compress(rows, 6)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
