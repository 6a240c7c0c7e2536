"""Reads block volumes that VMs boot from, fills them with an image, and seals them. Each step records its progress on the volume.

An flock on the device keeps other writers away, also while qemu-img copies. QEMU's own locks show whether a VM runs on the
device, under whatever name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from virtshim.model.errors import InternalError, InvalidRequest, NotFound, ResourceExhausted, WrongState
from virtshim.model.hardware import Places
from virtshim.model.ids import ContainerId, ImageDigest
from virtshim.model.image import DiskFormat, Image
from virtshim.model.vm import Disk
from virtshim.system.files import OUT_OF_SPACE
from virtshim.volumes.root_volume import DATA_AT, HEAD_BYTES, SECTOR, RootVolume, copying, header, parse, with_places

# Arguments: the image's path and format, the open device, the offset of the copy.
CopyImage: TypeAlias = Callable[[str, DiskFormat, int, int], None]

_SERIAL: Final = "root"
# The offset of QEMU's lock bytes in a file, and their number.
_QEMU_LOCKS: Final = (100, 200)
# struct flock.
_FLOCK: Final = struct.Struct("hhqqi4x")


class RootVolumeStore:
    """Implements `virtshim.disks.ports.RootVolumes`. `copy_image`: copies an image to an offset of an open device."""

    def __init__(self, copy_image: CopyImage) -> None:
        self._copy_image = copy_image

    def look(self, device: str) -> RootVolume:
        with _opened(device, os.O_RDONLY) as file:
            size = os.lseek(file, 0, os.SEEK_END)
            return parse(os.pread(file, HEAD_BYTES, 0), size)

    def begin(self, device: str, container: ContainerId) -> None:
        with _locked(device) as file:
            _write_sector(file, copying(container))

    def copy(self, device: str, container: ContainerId, image: Image, image_path: str) -> None:
        if not os.path.isfile(image_path):
            raise NotFound(f"the file of image {image.digest} is gone from this node; pull the image again")
        with _locked(device) as file:
            _refuse_unless_begun(device, file, container)
            self._copy_image(image_path, image.format, file, DATA_AT)
            os.fsync(file)

    def seal(self, device: str, container: ContainerId, image: ImageDigest) -> None:
        with _locked(device) as file:
            _refuse_unless_begun(device, file, container)
            _write_sector(file, header(image, container))

    def keep_places(self, device: str, places: Places) -> None:
        with _locked(device) as file:
            sector = os.pread(file, SECTOR, 0)
            if (changed := with_places(sector, places)) != sector:
                _write_sector(file, changed)

    def disk(self, device: str) -> Disk:
        with _opened(device, os.O_RDONLY) as file:
            size = os.lseek(file, 0, os.SEEK_END)
        room = (size - DATA_AT) // SECTOR * SECTOR
        return Disk(device, DiskFormat.RAW, _SERIAL, is_device=True, data_at=DATA_AT, data_bytes=room)


@contextlib.contextmanager
def _opened(device: str, flags: int) -> Iterator[int]:
    """Reports each OSError inside the `with` block as an error of the volume."""
    try:
        file = os.open(device, flags | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            yield file
        finally:
            os.close(file)
    except OSError as exc:
        what = f"the volume {device} for the root disk: {exc.strerror}"
        if exc.errno in OUT_OF_SPACE:
            raise ResourceExhausted(f"{what}; the storage behind it is full") from exc
        if exc.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise InvalidRequest(f"{what}; it must be writable") from exc
        if exc.errno == errno.EBUSY:
            raise WrongState(
                f"{what}: the node uses it, or a copy to it is still running; unmount it on the node, or try again"
            ) from exc
        raise InternalError(what) from exc


@contextlib.contextmanager
def _locked(device: str) -> Iterator[int]:
    """Opens the device for writing, exclusively. O_EXCL fails if the block device is mounted."""
    with _opened(device, os.O_RDWR | os.O_EXCL) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WrongState(f"the volume {device} is being written to; try again when the writing has ended") from None
        if _is_locked_by_qemu(file):
            raise WrongState(f"a VM runs on the volume {device}; stop it first")
        yield file


def _is_locked_by_qemu(file: int) -> bool:
    """Whether QEMU holds a lock. It locks one byte for each kind of access that it has, or that it lets nobody else have."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _QEMU_LOCKS[0], _QEMU_LOCKS[1], 0)
    answer = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))
    return bool(answer[0] != fcntl.F_UNLCK)


def _write_sector(file: int, sector: bytes) -> None:
    if os.pwrite(file, sector, 0) != len(sector):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    os.fsync(file)


def _refuse_unless_begun(device: str, file: int, container: ContainerId) -> None:
    if os.pread(file, SECTOR, 0) != copying(container):
        raise WrongState(f"something else wrote to the volume {device} meanwhile; let only one pod use it")
