"""Block volumes that VMs boot from: read, filled with an image, sealed. Each step leaves on the volume how far it came.

Nobody else writes one meanwhile: its lock (flock) is held, during the copy by qemu-img too. A VM that runs on it is told by
QEMU's own locks, whatever name the device has.
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
from virtshim.volumes.root_volume import DATA_AT, HEAD_BYTES, SECTOR, RootVolume, copying, header, parse, with_places

# Its path, its format; the device, and where in it the copy begins.
CopyImage: TypeAlias = Callable[[str, DiskFormat, int, int], None]

_SERIAL: Final = "root"
# Where QEMU's locks are in a file, and how many bytes from there.
_QEMU_LOCKS: Final = (100, 200)
# struct flock.
_FLOCK: Final = struct.Struct("hhqqi4x")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class RootVolumeStore:
    """Implements `virtshim.disks.ports.RootVolumes`. `copy_image`: writes what is in an image's file behind the first bytes of an
    open device."""

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
    """Errors of what is done inside are the volume's."""
    try:
        file = os.open(device, flags | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            yield file
        finally:
            os.close(file)
    except OSError as exc:
        what = f"the volume {device} for the root disk: {exc.strerror}"
        if exc.errno in _FULL:
            raise ResourceExhausted(f"{what}; the storage behind it is full") from exc
        if exc.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise InvalidRequest(f"{what}; it must be writable") from exc
        if exc.errno == errno.EBUSY:
            raise WrongState(
                f"{what}: the node uses it, or a copy to it has not ended; unmount it there, or try again"
            ) from exc
        raise InternalError(what) from exc


@contextlib.contextmanager
def _locked(device: str) -> Iterator[int]:
    """For writing, alone. O_EXCL: of block devices none that is mounted."""
    with _opened(device, os.O_RDWR | os.O_EXCL) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WrongState(f"the volume {device} is being written to; try again when that has ended") from None
        if _is_a_vms(file):
            raise WrongState(f"a VM runs on the volume {device}; stop it first")
        yield file


def _is_a_vms(file: int) -> bool:
    """QEMU holds a byte for each thing that it does, or bears nobody else doing."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _QEMU_LOCKS[0], _QEMU_LOCKS[1], 0)
    answer = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))
    return bool(answer[0] != fcntl.F_UNLCK)


def _write_sector(file: int, sector: bytes) -> None:
    if os.pwrite(file, sector, 0) != len(sector):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    os.fsync(file)


def _refuse_unless_begun(device: str, file: int, container: ContainerId) -> None:
    if os.pread(file, SECTOR, 0) != copying(container):
        raise WrongState(f"the volume {device} was written to by somebody else meanwhile; let one pod alone use it")
