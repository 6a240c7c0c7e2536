"""The frames between virtshim and the child that unpacks layers: a letter, a length, that many bytes.

virtshim sends BEGIN (words: image, max_bytes, path of the disk; "" if neither disk nor kernels are wanted). For each layer, from
the top down, it sends LAYER (words: what, digest, diff, TAR or WHOLE), DATA as it arrives, and END. It ends with DONE.

The child sends:

    SIZE     of the disk, in digits
    DATA     bytes of the disk
    FILE     (words: path, size): the next `size` bytes of DATA belong to this kernel file, not to the disk
    ENTRY    a file of the image, for volumes (words: see `contents`); PIECE: bytes of that file
    NO_TREE  why the image cannot be a volume
    END      after each layer
    NO_DISK  before DONE, if the image has files only
    DONE, or REFUSED and the reason
"""

from __future__ import annotations

import re
import struct

BEGIN, LAYER, DATA, END, DONE, SIZE, FILE, REFUSED = b"B", b"L", b"D", b"E", b"F", b"S", b"K", b"X"
ENTRY, PIECE, NO_TREE, NO_DISK = b"T", b"P", b"R", b"V"

TAR, WHOLE = "tar", "whole"
"""Whether an unpacked layer is a tar archive or the disk itself."""

DEFAULT_PLACE = "disk"
"""The directory of the disk in a containerDisk, as KubeVirt packs it."""

BOOT_PLACE = "boot"
"""The directory of kernels and initrds, in KubeVirt's images as in distributions."""

BOOT_PATH = re.compile(f"/{BOOT_PLACE}/[A-Za-z0-9_+][A-Za-z0-9._+-]{{0,199}}")

MOST_BOOT_FILES, MOST_BOOT_BYTES, MOST_BOOT_TOTAL = 16, 512 << 20, 1 << 30
"""Limits of boot files: their number, bytes of each, bytes of all."""

RATIO, ALWAYS = 256, 64 << 30
"""The layers of an image may unpack to RATIO times their size, or to ALWAYS bytes if that is more. An image beyond both limits is
made to waste processor time."""

ROOT, ASIDE = "root", "aside"
"""The first component of paths: of the image's files, and of hidden files that hard links may still need."""

MOST_ENTRIES = 400_000
"""Entries in the layers of an image that can be a volume."""

MOST_DEPTH = 256
"""Depth of directories in such an image. Code that counts or removes them recurses once per level."""

DEPTH_ONCE, DEPTH_EACH = 50_000, 32
"""Limit of the sum of all entries' depths: DEPTH_ONCE, plus DEPTH_EACH per entry. Each entry costs a step per directory above it,
so a tree that is deep everywhere is made to waste processor time."""

QCOW_MAGIC = b"QFI\xfb"
"""The first bytes of a qcow2 disk."""

MOST = 1 << 20
"""The largest payload, in bytes."""

CANNOT_CONFINE = 97
"""Exit code: the child could not drop its rights, so it read nothing."""

_HEAD = struct.Struct(">cI")
HEAD_BYTES = _HEAD.size


def head(kind: bytes, length: int) -> bytes:
    return _HEAD.pack(kind, length)


def words(*texts: str) -> bytes:
    """No text may contain a NUL."""
    return "\0".join(texts).encode(errors="replace")


def parse_words(payload: bytes) -> list[str]:
    return payload.decode().split("\0")


def names(*texts: str) -> bytes:
    """Like `words`, but keeps file names that are not UTF-8."""
    return "\0".join(texts).encode(errors="surrogateescape")


def parse_names(payload: bytes) -> list[str]:
    return payload.decode(errors="surrogateescape").split("\0")


def parse_head(data: bytes) -> tuple[bytes, int]:
    """(kind, length). Raises ValueError if the length exceeds MOST."""
    kind, length = _HEAD.unpack(data)
    if length > MOST:
        raise ValueError(f"a frame of {length} bytes")
    return kind, length
