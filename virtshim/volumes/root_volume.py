"""A block volume that a VM boots from: what its first sector says, and what virtshim does about it. Pure.

The first sector has Virtlet's header, so that volumes can move between Virtlet and virtshim: a magic number, a version, and the
SHA-256 of the image that is copied to the volume after the sector. Virtlet ignores the sector's other bytes; virtshim
stores the disk's identity there, by which cloud-init recognizes the disk. The header is written last: until then the
sector says that a copy is under way, and for which container.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from virtshim.devices.values import GrantedDevices
from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.model.hardware import Places, places_from_bytes
from virtshim.model.ids import ContainerId, ImageDigest
from virtshim.model.image import Image

SECTOR: Final = 512
# Where the copy of the image starts.
DATA_AT: Final = SECTOR
# How much of a volume is examined. If all of it is zeros, the volume has no file system, partition table or the like.
HEAD_BYTES: Final = 1 << 20

_MAGIC: Final = 0x263D_BE52_BA57_6702
_VERSION: Final = 1
_HEADER: Final = struct.Struct(">QH32s")
_IDENTITY: Final = struct.Struct("8s20s")
_IDENTITY_AT: Final = 64
_IDENTITY_MAGIC: Final = b"virtshim"
_PLACES_AT: Final = 96
_COPYING: Final = b"virtshim copies a root disk to here for container "

# The name of the field that asks for a root volume.
DEVICE: Final = "config.devices[container_path /]"
ON_CHANGE: Final = "virtshim.io/root-disk-on-image-change"


class Content(enum.Enum):
    BLANK = "blank"
    # An unfinished copy.
    HALF = "half"
    ROOT_DISK = "root disk"
    # A root disk of an unknown, newer version.
    NEWER = "newer"
    # Other data.
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RootVolume:
    content: Content
    size_bytes: int
    # The image that a ROOT_DISK is a copy of.
    image: ImageDigest | None = None
    # The identity of a ROOT_DISK, 20 hex digits. A disk that Virtlet made has those of its image.
    identity: str = ""
    version: int = _VERSION
    # The device addresses that the guest of a ROOT_DISK knows.
    places: Places = Places()


def parse(head: bytes, size_bytes: int) -> RootVolume:
    """`head`: the volume's first HEAD_BYTES, or the whole of a smaller volume."""
    if len(head) < SECTOR or head.count(0) == len(head):
        return RootVolume(Content.BLANK, size_bytes)
    if head.startswith(_COPYING):
        return RootVolume(Content.HALF, size_bytes)
    magic, version, digest = _HEADER.unpack_from(head)
    if magic != _MAGIC:
        return RootVolume(Content.OTHER, size_bytes)
    if version != _VERSION:
        return RootVolume(Content.NEWER, size_bytes, version=version)
    image = ImageDigest(f"sha256:{digest.hex()}")
    identity = _identity(head)
    known = places_from_bytes(head[_PLACES_AT:SECTOR]) if identity else Places()
    return RootVolume(Content.ROOT_DISK, size_bytes, image, identity or image.hex[:20], places=known)


def _identity(head: bytes) -> str:
    magic, text = _IDENTITY.unpack_from(head, _IDENTITY_AT)
    is_ours = magic == _IDENTITY_MAGIC and set(text) <= set(b"0123456789abcdef")
    return text.decode() if is_ours else ""


def copying(container: ContainerId) -> bytes:
    """The sector while the image is copied for that container."""
    return (_COPYING + container.value.encode()).ljust(SECTOR, b"\0")


def header(image: ImageDigest, container: ContainerId) -> bytes:
    """The sector of a finished copy. The container that it was made for gives the disk its identity."""
    sector = bytearray(SECTOR)
    _HEADER.pack_into(sector, 0, _MAGIC, _VERSION, bytes.fromhex(image.hex))
    _IDENTITY.pack_into(sector, _IDENTITY_AT, _IDENTITY_MAGIC, container.short.encode())
    return bytes(sector)


def with_places(sector: bytes, wanted: Places) -> bytes:
    """The sector of a root disk, with the device addresses added. A sector that Virtlet made stays unchanged, because
    its other bytes may be anything."""
    if not _identity(sector):
        return sector
    return sector[:_PLACES_AT] + wanted.to_bytes().ljust(SECTOR - _PLACES_AT, b"\0")


def refuse_unfit(granted: GrantedDevices, *, keep_root_disk: bool) -> None:
    """Raises InvalidRequest for a root volume that no VM can boot from."""
    volume = granted.root_volume
    if volume is None:
        return
    if volume.readonly:
        raise InvalidRequest(f"{DEVICE}: a VM writes to its root disk; take readOnly from the volume")
    others = [block for block in granted.blocks if block != volume]
    if any(block.is_root or block.host_path == volume.host_path for block in others):
        raise InvalidRequest(
            f"{DEVICE}: there are two root disks, or one volume twice; remove one of these volumeDevices"
        )
    if keep_root_disk:
        raise InvalidRequest(
            "annotation virtshim.io/root-disk: the pod boots from the volume at devicePath /, which is kept anyway; remove "
            "the annotation"
        )


def must_be_written(found: RootVolume, image: Image, *, replace: bool) -> bool:
    """Whether to copy the image to the volume. If not, the VM boots from the volume's content. Raises InvalidRequest
    or WrongState if neither is allowed. `replace`: whether the pod asks to replace what is there."""
    if found.content is Content.ROOT_DISK and found.image == image.digest:
        return False
    _refuse_to_lose(found, image, replace=replace)
    wanted = DATA_AT + -(-image.virtual_size // SECTOR) * SECTOR
    if found.size_bytes < wanted:
        raise InvalidRequest(
            f"{DEVICE}: the volume has {found.size_bytes} bytes, but the image's disk needs {wanted}; use a larger volume, "
            "or a smaller image"
        )
    return True


def _refuse_to_lose(found: RootVolume, image: Image, *, replace: bool) -> None:
    if found.content is Content.NEWER:
        raise WrongState(
            f"{DEVICE}: the volume has a root disk of version {found.version}, but this virtshim knows version {_VERSION}; "
            "upgrade virtshim, or use another volume"
        )
    if replace:
        return
    remedy = f"use another volume, or set annotation {ON_CHANGE}: replace to lose its data"
    if found.content is Content.ROOT_DISK:
        raise WrongState(
            f"{DEVICE}: the volume has a root disk of image {found.image}, but the pod asks for {image.digest}; set the "
            f"pod's image back, {remedy}"
        )
    if found.content is Content.OTHER:
        raise WrongState(
            f"{DEVICE}: the volume has data that is not a root disk, and virtshim does not overwrite it; wipe it, {remedy}"
        )
