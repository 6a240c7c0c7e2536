"""Whether qemu-img's findings about a downloaded file agree with its header's verdict. Pure.

Both come from a child that may have been taken over by the file (`virtshim.images.confined.program`): the verdict is written
before qemu-img has seen the file, and either of the two refuses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from virtshim.domain.errors import InternalError, InvalidRequest
from virtshim.domain.image import DiskFormat
from virtshim.domain.printable import printable_text

# What `judged_before` wants to see.
FIRST_BYTES = 32

_QCOW_MAGIC = b"QFI\xfb"
_CONVERT = "convert it with qemu-img convert -O qcow2"


@dataclass(frozen=True, slots=True)
class DiskInfo:
    """What `qemu-img info` says. `virtual_size` is in bytes."""

    format: str
    virtual_size: int
    has_backing: bool
    has_data_file: bool
    encrypted: bool
    corrupt: bool


def judged_before(first: bytes, size: int) -> tuple[DiskFormat, int]:
    """Format and guest-visible bytes of a disk that was judged when it was pulled, by its first bytes and its size."""
    if not first.startswith(_QCOW_MAGIC):
        return DiskFormat.RAW, size
    if len(first) < FIRST_BYTES:
        raise InternalError("a stored disk has lost its header; remove its image and pull it again")
    return DiskFormat.QCOW2, int.from_bytes(first[24:32], "big")


def judge_info(info: DiskInfo, found: DiskFormat, max_bytes: int, image: str) -> None:
    """Raises InvalidRequest unless qemu-img agrees with the header's verdict, and the guest's disk is not too large."""
    if info.format != found.value:
        raise _unusable(
            image,
            f"is taken for {printable_text(info.format[:40])} by qemu-img though it begins like {found.value}",
            _CONVERT,
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
