"""What a qcow2's header says of other files. Pure: bytes in, a few facts out; nothing in them is trusted.

https://gitlab.com/qemu-project/qemu/-/blob/master/docs/interop/qcow2.rst
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# qemu-img writes all of it, the name of the file below included, into the first few hundred bytes; a header that goes on
# behind these is none that was made here.
HEAD_BYTES: Final = 1 << 16

_MAGIC: Final = b"QFI\xfb"
_VERSION_2_BYTES: Final = 72
_VERSION_3_BYTES: Final = 104
_LONGEST_NAME: Final = 1023
_DATA_FILE: Final = 1 << 2
_MOST_EXTENSIONS: Final = 64
_END, _BACKING_FORMAT, _DATA_FILE_NAME = 0, 0xE2792ACA, 0x44415441


class BadHeader(Exception):
    """Says what is wrong."""


@dataclass(frozen=True, slots=True)
class Qcow2Header:
    # As it stands there; "" for none.
    backing: str
    backing_format: str
    has_data_file: bool
    encrypted: bool


def parse(head: bytes) -> Qcow2Header:
    """`head`: the file's first HEAD_BYTES, or all of it. Raises BadHeader."""
    if len(head) < _VERSION_3_BYTES or not head.startswith(_MAGIC):
        raise BadHeader("it is no qcow2 any more")
    version, at, size = struct.unpack_from(">IQI", head, 4)
    (encryption,) = struct.unpack_from(">I", head, 32)
    if version not in (2, 3):
        raise BadHeader(f"its version is {version}")
    features = struct.unpack_from(">Q", head, 72)[0] if version == 3 else 0
    length = struct.unpack_from(">I", head, 100)[0] if version == 3 else _VERSION_2_BYTES
    if version == 3 and length < _VERSION_3_BYTES:
        raise BadHeader(f"its header has {length} bytes")
    found = dict(_extensions(head, length))
    return Qcow2Header(
        backing=_name(head, at, size) if at else "",
        backing_format=found.get(_BACKING_FORMAT, b"").decode(errors="backslashreplace"),
        has_data_file=bool(features & _DATA_FILE) or _DATA_FILE_NAME in found,
        encrypted=encryption != 0,
    )


def _name(head: bytes, at: int, size: int) -> str:
    if not 0 < size <= _LONGEST_NAME or at + size > len(head):
        raise BadHeader("the name of the file below it lies outside the header")
    return head[at : at + size].decode(errors="backslashreplace")


def _extensions(head: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    for _ in range(_MOST_EXTENSIONS):
        if at + 8 > len(head):
            raise BadHeader("its header extensions have no end")
        kind, size = struct.unpack_from(">II", head, at)
        if kind == _END:
            return
        if at + 8 + size > len(head):
            raise BadHeader("a header extension reaches beyond the header")
        yield kind, head[at + 8 : at + 8 + size]
        at += 8 + (size + 7) // 8 * 8
    raise BadHeader("it has too many header extensions")
