"""Judges by its first and last bytes whether a downloaded file may become a VM's disk.

Images are hostile. A qcow2 can name any file of the host as its backing or data file, and a file can look raw here and like
another format to a program that probes it. So the header is judged before any program opens the file, qemu-img must agree, and
from then on every program gets the format explicitly.
https://gitlab.com/qemu-project/qemu/-/blob/master/docs/interop/qcow2.rst
"""

from __future__ import annotations

import os
import struct

from virtshim.images.confined.frames import QCOW_MAGIC

# The bytes of the file's beginning and end that `judge_bytes` needs.
HEAD_BYTES = 4096
TAIL_BYTES = 512

_SECTOR = 512
_CORRUPT, _DATA_FILE = 1 << 1, 1 << 2
_CONVERT = "convert it with qemu-img convert -O qcow2"
_UNPACK = "unpack it and publish the disk itself"

# (offset in the head, bytes, what it is, remedy): formats that QEMU would detect, then files that are published by mistake.
_FOREIGN: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"KDMV", "a VMDK", _CONVERT),
    (0, b"COWD", "a VMDK", _CONVERT),
    (0, b"version=", "a VMDK descriptor", _CONVERT),
    (64, b"\x7f\x10\xda\xbe", "a VDI", _CONVERT),
    (0, b"conectix", "a VHD", _CONVERT),
    (0, b"vhdxfile", "a VHDX", _CONVERT),
    (0, b"QED\0", "a QED image", _CONVERT),
    (0, b"LUKS\xba\xbe", "an encrypted (LUKS) image", "publish it unencrypted"),
    (0, b"WithoutFreeSpace", "a Parallels image", _CONVERT),
    (0, b"WithouFreSpacExt", "a Parallels image", _CONVERT),
    (0, b"Bochs Virtual HD Image", "a Bochs image", _CONVERT),
    (0, b"\x1f\x8b", "compressed with gzip", _UNPACK),
    (0, b"\xfd7zXZ\0", "compressed with xz", _UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "compressed with zstd", _UNPACK),
    (0, b"BZh", "compressed with bzip2", _UNPACK),
    (0, b"PK\3\4", "a ZIP archive", _UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"<", "a web page or XML", "check that the URL is that of the disk"),
    # QEMU skips comments and blanks before it looks for a VMDK descriptor.
    (0, b"#", "a script or a VMDK descriptor", "publish a qcow2 or raw disk"),
    (0, b" ", "a text", "publish a qcow2 or raw disk"),
    (0, b"\r", "a text", "publish a qcow2 or raw disk"),
    (0, b"\n", "a text", "publish a qcow2 or raw disk"),
)
_FOREIGN_TAILS = ((0, b"conectix", "a VHD", _CONVERT), (0, b"koly", "a DMG", _CONVERT))


class Unusable(Exception):
    """The file may not become a disk. `str()` says why and what to do, as the rest of a sentence that begins with the file."""


def verdict(descriptor: int) -> tuple[str, bool]:
    """The verdict on the open file as one line, and whether qemu-img may open the file."""
    size = os.fstat(descriptor).st_size
    head, tail = os.pread(descriptor, HEAD_BYTES, 0), os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
    try:
        return f"format {judge_bytes(head, tail, size)}", True
    except Unusable as exc:
        return f"unusable {exc}", False


def judge_bytes(head: bytes, tail: bytes, size: int) -> str:
    """Returns "qcow2" or "raw". Raises Unusable unless the file is a self-contained qcow2 or a raw disk."""
    if size == 0:
        raise _unusable("is empty (0 bytes)", "publish it again")
    if head.startswith(QCOW_MAGIC):
        _judge_qcow2(head)
        return "qcow2"
    for start, foreign in ((head, _FOREIGN), (tail, _FOREIGN_TAILS)):
        for offset, magic, what, remedy in foreign:
            if start.startswith(magic, offset):
                raise _unusable(f"is {what}", remedy)
    if size % _SECTOR:
        raise _unusable(
            f"is not a disk: its {size} bytes are not whole 512-byte sectors", "publish a qcow2 or raw disk"
        )
    return "raw"


def _judge_qcow2(head: bytes) -> None:
    if len(head) < 104:
        raise _unusable("is cut short: its header is incomplete", "publish it again")
    version, backing_offset = struct.unpack_from(">IQ", head, 4)
    (crypt_method,) = struct.unpack_from(">I", head, 32)
    if version not in (2, 3):
        raise _unusable(f"is QCOW version {version}, which is not supported", _CONVERT)
    # Version 2 headers end at 72 and have no features.
    features = struct.unpack_from(">Q", head, 72)[0] if version == 3 else 0
    if backing_offset:
        raise _unusable("has a backing file, which would be read from this host", _CONVERT)
    if features & _DATA_FILE:
        raise _unusable("keeps its data in another file, which would be read from this host", _CONVERT)
    if crypt_method:
        raise _unusable("is encrypted", "publish it unencrypted")
    if features & _CORRUPT:
        raise _unusable("is marked corrupt", "repair it with qemu-img check -r all and publish it again")


def _unusable(why: str, remedy: str) -> Unusable:
    return Unusable(f"{why}; {remedy}")
