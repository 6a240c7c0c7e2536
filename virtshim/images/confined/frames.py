"""What virtshim and the child that unpacks layers tell each other: a letter, a length, that many bytes.

To the child: BEGIN (words: image, max_bytes, place of its disk, "" if neither it nor kernels are looked for), then for each
layer, from the top one down, LAYER (words: what, digest, diff, whether it is a tar or the disk itself), DATA as it comes in, END;
at last DONE. From it: SIZE (the disk's, in digits), DATA (the disk), END (of a layer), DONE, or REFUSED and why. Behind a FILE
(words: path, size) so many bytes of DATA are that file's, and not the disk's. Beside that the files of the image, for who
mounts it as a volume: ENTRY (words, see `image_tree`) and PIECE (of a file's data), or NO_TREE and why; NO_DISK before DONE: they
are all there is.
"""

from __future__ import annotations

import re
import struct

BEGIN, LAYER, DATA, END, DONE, SIZE, FILE, REFUSED = b"B", b"L", b"D", b"E", b"F", b"S", b"K", b"X"
ENTRY, PIECE, NO_TREE, NO_DISK = b"T", b"P", b"R", b"V"

TAR, WHOLE = "tar", "whole"
"""What a layer is, when it is unpacked."""

DEFAULT_PLACE = "disk"
"""Of a disk in its image, as KubeVirt packs them."""

BOOT_PLACE = "boot"
"""Of kernels and what they are started with, as KubeVirt's images and distributions have them."""

BOOT_PATH = re.compile(f"/{BOOT_PLACE}/[A-Za-z0-9_+][A-Za-z0-9._+-]{{0,199}}")

MOST_BOOT_FILES, MOST_BOOT_BYTES, MOST_BOOT_TOTAL = 16, 512 << 20, 1 << 30
"""What is taken of them: so many, the bytes of each, those of all."""

RATIO, ALWAYS = 256, 64 << 30
"""So many times their size, or so many bytes, the layers of an image may unpack to. One beyond both is made to keep a processor
busy."""

ROOT, ASIDE = "root", "aside"
"""Where the files of an image are told to be, and those that others may still be links to."""

MOST_ENTRIES = 400_000
"""In the layers of an image, if its files are to be a volume."""

MOST_DEPTH = 256
"""Directories one in the other, for the same. What looks into all of them, to count or to remove them, calls itself for each."""

DEPTH_ONCE, DEPTH_EACH = 50_000, 32
"""The depths of all entries together: so much, and so much for each. Each is a name of every directory above it: trees that are
deep everywhere are made to keep a processor busy."""

MOST = 1 << 20
"""Bytes that follow a head."""

CANNOT_CONFINE = 97
"""Exit code: what was to be given up could not be. Nothing was read."""

_HEAD = struct.Struct(">cI")
HEAD_BYTES = _HEAD.size


def head(kind: bytes, length: int) -> bytes:
    return _HEAD.pack(kind, length)


def words(*texts: str) -> bytes:
    """No text holds a NUL."""
    return "\0".join(texts).encode(errors="replace")


def parse_words(payload: bytes) -> list[str]:
    return payload.decode().split("\0")


def names(*texts: str) -> bytes:
    """As `words`, but whatever bytes a file's name has."""
    return "\0".join(texts).encode(errors="surrogateescape")


def parse_names(payload: bytes) -> list[str]:
    return payload.decode(errors="surrogateescape").split("\0")


def parse_head(data: bytes) -> tuple[bytes, int]:
    """(kind, length). Raises ValueError if no frame is that long."""
    kind, length = _HEAD.unpack(data)
    if length > MOST:
        raise ValueError(f"a frame of {length} bytes")
    return kind, length
