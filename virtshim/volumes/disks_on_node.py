"""The files of volumes that are disks in the guest. Implements `virtshim.volumes.ports.VolumeDiskFiles`."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Final

from virtshim.model.errors import InternalError, InvalidRequest, NotFound
from virtshim.model.text import escaped
from virtshim.volumes.disk_images import DISK_IMAGES_ANNOTATION, DISK_IMAGES_FILE, FILE, MAX_BYTES

# Follows no link in a volume, and does not wait for a FIFO.
_SAFE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class VolumeDisksOnNode:
    def flex_options(self, directory: str) -> bytes:
        missing = (
            "another driver handles Virtlet's flexVolumes on this node, or the driver did not write the file; install "
            "/usr/share/virtshim/flexvolume_driver (without the package: deploy/flexvolume_driver of the sources)"
        )
        with _regular_file(directory, FILE, missing) as file:
            text = os.pread(file, MAX_BYTES + 1, 0)
        if len(text) > MAX_BYTES:
            raise InvalidRequest(
                f"{_name(directory, FILE)} has more than {MAX_BYTES} bytes; shorten the flexVolume's options"
            )
        return text

    def image(self, directory: str, *, readonly: bool) -> str:
        missing = (
            f"put a raw disk image there, or remove the volume's path from the annotation {DISK_IMAGES_ANNOTATION}"
        )
        with _regular_file(directory, DISK_IMAGES_FILE, missing, os.O_RDONLY if readonly else os.O_RDWR) as file:
            found = os.fstat(file)
        if not found.st_size:
            raise InvalidRequest(
                f"{_name(directory, DISK_IMAGES_FILE)} is empty; give it the disk's size (truncate -s 10G), or write a disk to it"
            )
        return f"file {os.major(found.st_dev)}:{os.minor(found.st_dev)} {found.st_ino}"


@contextlib.contextmanager
def _regular_file(directory: str, name: str, missing: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Yields the opened file. `missing`: what a missing file means, with the remedy."""
    what = _name(directory, name)
    try:
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            file = os.open(name, flags | _SAFE, dir_fd=place)
        finally:
            os.close(place)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise NotFound(f"{what} is not there: {missing}") from exc
    except OSError as exc:
        if exc.errno == errno.EROFS:
            raise InvalidRequest(f"{what} cannot be written to; mount the volume with readOnly") from exc
        if exc.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise InvalidRequest(f"{what} is not a regular file") from exc
        raise InternalError(f"{what} cannot be opened: {exc.strerror}") from exc
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise InvalidRequest(f"{what} is not a regular file")
        yield file
    except OSError as exc:
        raise InternalError(f"{what} cannot be read: {exc.strerror}") from exc
    finally:
        os.close(file)


def _name(directory: str, name: str) -> str:
    return f"{escaped(directory, 300)}/{name}"
