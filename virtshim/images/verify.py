"""Which downloaded files may become a VM's disk. Pure: the file's first bytes and qemu-img's findings in, a verdict out.

Images are hostile: a qcow2 can name any file of the host as its backing or data file, and a file can be made to look raw
here and like something else to whoever probes it. So the header is judged before any program opens the file, qemu-img must
then agree, and the format is given explicitly ever after.
https://gitlab.com/qemu-project/qemu/-/blob/master/docs/interop/qcow2.rst
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from virtshim.domain.errors import InternalError, InvalidRequest
from virtshim.domain.image import DiskFormat

# How much of the file's beginning and end `judge_bytes` wants to see.
HEAD_BYTES = 4096
TAIL_BYTES = 512

_SECTOR = 512
QCOW_MAGIC = b"QFI\xfb"
_CORRUPT, _DATA_FILE = 1 << 1, 1 << 2
_CONVERT = "convert it with qemu-img convert -O qcow2"
_UNPACK = "unpack it and publish the disk itself"

# (offset in the head, bytes, what it is, remedy): what QEMU takes for another format, then what is published by mistake.
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
    (0, b"<", "a web page or XML", "check that the URL is the disk's own"),
    # QEMU skips comments and blanks before it looks for a VMDK descriptor.
    (0, b"#", "a script or a VMDK descriptor", "publish a qcow2 or raw disk"),
    (0, b" ", "a text", "publish a qcow2 or raw disk"),
    (0, b"\r", "a text", "publish a qcow2 or raw disk"),
    (0, b"\n", "a text", "publish a qcow2 or raw disk"),
)
_FOREIGN_TAILS = ((0, b"conectix", "a VHD", _CONVERT), (0, b"koly", "a DMG", _CONVERT))


@dataclass(frozen=True, slots=True)
class DiskInfo:
    """What `qemu-img info` says. `virtual_size` is in bytes."""

    format: str
    virtual_size: int
    has_backing: bool
    has_data_file: bool
    encrypted: bool
    corrupt: bool


def judge_bytes(head: bytes, tail: bytes, size: int, image: str) -> DiskFormat:
    """The format by the file's own bytes. Raises InvalidRequest for everything but a self-contained qcow2 or a raw disk."""
    if size == 0:
        raise _unusable(image, "is empty (0 bytes)", "publish it again")
    if head.startswith(QCOW_MAGIC):
        _judge_qcow2(head, image)
        return DiskFormat.QCOW2
    for start, foreign in ((head, _FOREIGN), (tail, _FOREIGN_TAILS)):
        for offset, magic, what, remedy in foreign:
            if start.startswith(magic, offset):
                raise _unusable(image, f"is {what}", remedy)
    if size % _SECTOR:
        raise _unusable(
            image, f"is not a disk: its {size} bytes are not whole 512-byte sectors", "publish a qcow2 or raw disk"
        )
    return DiskFormat.RAW


def judge_info(info: DiskInfo, found: DiskFormat, max_bytes: int, image: str) -> None:
    """Raises InvalidRequest unless qemu-img agrees with `judge_bytes`, and the guest's disk is not too large."""
    if info.format != found.value:
        raise _unusable(
            image, f"is taken for {info.format[:40]} by qemu-img though it begins like {found.value}", _CONVERT
        )
    if info.has_backing:
        raise _has_backing(image)
    if info.has_data_file:
        raise _has_data_file(image)
    if info.encrypted:
        raise _unusable(image, "is encrypted", "publish it unencrypted")
    if info.corrupt:
        raise _is_corrupt(image)
    if not 0 < info.virtual_size <= max_bytes:
        raise _unusable(
            image,
            f"gives the guest a disk of {info.virtual_size} bytes; allowed are 1 to {max_bytes}",
            "use a smaller one or raise images.max_bytes",
        )


def parse_info(output: bytes) -> DiskInfo:
    """The JSON of `qemu-img info`. Raises InternalError if it is not that."""
    try:
        document = json.loads(output)
        specific = _mapping(_mapping(document.get("format-specific")).get("data"))
        return DiskInfo(
            format=str(document["format"]),
            virtual_size=int(document["virtual-size"]),
            has_backing=any(key in document for key in ("backing-filename", "full-backing-filename", "backing-image")),
            has_data_file="data-file" in specific,
            encrypted=bool(document.get("encrypted")) or "encrypt" in specific,
            corrupt=bool(specific.get("corrupt")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise InternalError(
            "qemu-img info answers with something that is not its JSON; check the qemu-img installed"
        ) from exc


def _judge_qcow2(head: bytes, image: str) -> None:
    if len(head) < 104:
        raise _unusable(image, "is cut short: not even its header is whole", "publish it again")
    version, backing_offset = struct.unpack_from(">IQ", head, 4)
    (crypt_method,) = struct.unpack_from(">I", head, 32)
    if version not in (2, 3):
        raise _unusable(image, f"is QCOW version {version}, which is not supported", _CONVERT)
    # Version 2 headers end at 72 and have no features.
    features = struct.unpack_from(">Q", head, 72)[0] if version == 3 else 0
    if backing_offset:
        raise _has_backing(image)
    if features & _DATA_FILE:
        raise _has_data_file(image)
    if crypt_method:
        raise _unusable(image, "is encrypted", "publish it unencrypted")
    if features & _CORRUPT:
        raise _is_corrupt(image)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _has_backing(image: str) -> InvalidRequest:
    return _unusable(image, "has a backing file, which would be read from this host", _CONVERT)


def _has_data_file(image: str) -> InvalidRequest:
    return _unusable(image, "keeps its data in another file, which would be read from this host", _CONVERT)


def _is_corrupt(image: str) -> InvalidRequest:
    return _unusable(image, "is marked corrupt", "repair it with qemu-img check -r all and publish it again")


def _unusable(image: str, why: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(f"image {image!r} {why}; {remedy}")
