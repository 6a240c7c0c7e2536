"""Volumes that are disks in the guest. Implements `virtshim.ports.volume_disks.VolumeDiskFiles`."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Final

from virtshim.domain.errors import InternalError, InvalidRequest, NotFound
from virtshim.domain.printable import escaped
from virtshim.domain.volumes.flex_volumes import FILE, MAX_BYTES

# Nothing is followed in a volume, nobody's FIFO is waited for.
_SAFE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class VolumeDisksOnNode:
    def flex_options(self, directory: str) -> bytes:
        missing = (
            "the driver of Virtlet's flexVolumes on this node is another one, or has not written it; install "
            "deploy/flexvolume_driver"
        )
        with _regular_file(directory, FILE, missing) as file:
            text = os.pread(file, MAX_BYTES + 1, 0)
        if len(text) > MAX_BYTES:
            raise InvalidRequest(
                f"{_name(directory, FILE)} has more than {MAX_BYTES} bytes; shorten the flexVolume's options"
            )
        return text


@contextlib.contextmanager
def _regular_file(directory: str, name: str, missing: str) -> Iterator[int]:
    """Opened for reading. `missing`: what that means, and the remedy."""
    what = _name(directory, name)
    try:
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            file = os.open(name, os.O_RDONLY | _SAFE, dir_fd=place)
        finally:
            os.close(place)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise NotFound(f"{what} is not there: {missing}") from exc
    except OSError as exc:
        raise InternalError(f"{what} cannot be opened: {exc.strerror}") from exc
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise InvalidRequest(f"{what} is no regular file")
        yield file
    except OSError as exc:
        raise InternalError(f"{what} cannot be read: {exc.strerror}") from exc
    finally:
        os.close(file)


def _name(directory: str, name: str) -> str:
    return f"{escaped(directory, 300)}/{name}"
