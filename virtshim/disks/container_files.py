"""Files of containers on the node: empty disks, kernels and termination messages; the disk usage of all containers."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Final

from virtshim.model.errors import InternalError, InvalidRequest, NotFound, ResourceExhausted
from virtshim.model.ids import ContainerId
from virtshim.model.image import FilesystemUsage
from virtshim.model.layout import Layout, empty_disk_name
from virtshim.model.vm import Disk
from virtshim.system.files import OUT_OF_SPACE, mountpoint, private, space_taken, sync
from virtshim.system.process import run
from virtshim.volumes.empty_disks import EmptyDisk

# Seconds. qemu-img writes a few KiB.
_TIMEOUT: Final = 30.0


class EmptyDiskStore:
    """Implements `virtshim.disks.ports.EmptyDiskFiles`."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def create(self, container: ContainerId, wanted: EmptyDisk) -> Disk:
        path = Path(self._layout.container_dir(container), empty_disk_name(wanted.name))
        what = f"container {container}: disk {wanted.name}"
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            raise InternalError(f"{what}: the existing file cannot be removed: {exc.strerror}") from exc
        argv = ["qemu-img", "create", "-q", "-f", wanted.format.value, str(path), str(wanted.size_bytes)]
        done = run(argv, timeout=_TIMEOUT)
        if done.returncode != 0:
            path.unlink(missing_ok=True)
            if os.strerror(errno.ENOSPC) in done.summary():
                raise ResourceExhausted(f"{what}: there is no space for it in {path.parent}")
            raise InternalError(f"{what} cannot be created: {done.summary()}")
        return Disk(path=str(path), format=wanted.format, serial=wanted.name)


class KernelFileStore:
    """Implements `virtshim.disks.ports.KernelFiles`."""

    def is_there(self, path: str) -> bool:
        return os.path.lexists(path)

    def copy(self, source: str, path: str) -> None:
        beside = f"{path}.new"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            with open(source, "rb") as original, open(beside, "xb", opener=private) as half:
                shutil.copyfileobj(original, half, 1 << 20)
                half.flush()
                os.fsync(half.fileno())
            os.rename(beside, path)
            sync(os.path.dirname(path))
        except OSError as exc:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            if exc.errno == errno.ENOENT and not os.path.exists(source):
                raise NotFound(f"a kernel of the image, {source}, is gone; pull the image again") from exc
            if exc.errno in OUT_OF_SPACE:
                raise ResourceExhausted(f"{path} cannot be written: {exc.strerror}; free space there") from exc
            raise InternalError(f"{path} cannot be written: {exc.strerror}") from exc


class ContainersRoom:
    """Implements `virtshim.disks.ports.ContainersRoom`."""

    def __init__(self, layout: Layout) -> None:
        self._places = (Path(layout.containers), Path(layout.pod_disks))

    def filesystem_usage(self) -> FilesystemUsage:
        used, inodes = space_taken(path for place in self._places for path in (place, *place.rglob("*")))
        return FilesystemUsage(mountpoint(self._places[0]), used, inodes, time.time_ns())


# The pod may have replaced the file: no link is followed, and opening a FIFO does not block.
_SAFE_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class TerminationFileStore:
    """Implements `virtshim.guest.ports.TerminationFiles`."""

    def write(self, path: str, pod_uid: str, message: bytes) -> None:
        top, below = _split_at_pod(path, pod_uid)
        try:
            with contextlib.ExitStack() as opened:
                here = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                opened.callback(os.close, here)
                *directories, name = filter(None, below.split("/"))
                for directory in directories:
                    here = os.open(directory, os.O_PATH | os.O_DIRECTORY | _SAFE_FLAGS, dir_fd=here)
                    opened.callback(os.close, here)
                file = os.open(name, os.O_WRONLY | _SAFE_FLAGS, dir_fd=here)
                opened.callback(os.close, file)
                _overwrite(file, path, message)
        except OSError as exc:
            raise InternalError(f"the termination message cannot be written to {path}: {exc.strerror}") from exc


def _split_at_pod(path: str, pod_uid: str) -> tuple[str, str]:
    """kubelet's directory, whose path may have links, and the rest, which may not: /pods/UID/ and below belongs to a pod. A path
    without /pods/UID/ may have no link at all."""
    top, mark, below = path.partition(f"/pods/{pod_uid}/")
    if not mark:
        return "/", path
    return top or "/", mark + below


def _overwrite(file: int, path: str, message: bytes) -> None:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise InvalidRequest(
            f"{path} is not a regular file with one name: the termination message is not written there"
        )
    os.ftruncate(file, 0)
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(file, rest) :]
