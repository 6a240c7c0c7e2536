"""Files: synced, replaced atomically, counted, locked, and removed as whole trees."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import stat
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Final

# Errors of writes for which there is no room.
OUT_OF_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BLOCK = 512  # the unit of st_blocks, whatever the file system's own is
_SYNC_FILE_RANGE_WRITE = 2


def sync(path: str | os.PathLike[str]) -> None:
    """Waits until a file's content, or a directory's names, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin_sync(descriptor: int, first: int, count: int) -> None:
    """Starts to write these bytes to the disk without waiting, so that a later fsync takes less time. Does nothing if the
    file system or the C library cannot."""
    if (ask := _sync_file_range()) is not None:
        ask(descriptor, first, count, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


def replace_text(path: str, text: str, mode: int = 0o600) -> None:
    """Replaces a file's content atomically, and waits until it is on disk. `mode`: for a new file, less the umask. Raises
    OSError."""
    replace_bytes(path, text.encode(), mode)


def replace_bytes(path: str, content: bytes, mode: int = 0o600, new: str = "", *, synced: bool = True) -> None:
    """Like `replace_text`. `new`: the name of the file until it is complete, in the same directory; by default `path`.new.
    `synced`: whether to wait until the file is on disk."""
    new = new or f"{path}.new"
    # Removes the file of a killed process, and never writes into a file or link that somebody else put here.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with open(descriptor, "wb") as file:
        file.write(content)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    os.replace(new, path)
    if synced:
        sync(os.path.dirname(path) or ".")


def make_directory(path: str | os.PathLike[str], mode: int) -> None:
    """Makes the directory and those above it. Sets its mode, whatever the umask. Raises OSError."""
    os.makedirs(path, mode, exist_ok=True)
    if os.stat(path).st_mode & 0o777 != mode:
        os.chmod(path, mode)


def private(path: str, flags: int) -> int:
    """An opener for `open`: a new file is root's alone, and no symbolic link is followed as the path's last part."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def without_waiting(path: str, flags: int) -> int:
    """An opener for `open`: does not wait for a FIFO's writer."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def open_regular(path: str) -> FileIO:
    """Opens a file for reading where others may write: follows no symbolic link as its last part, and reads no pipe or device.
    Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", path)
    return FileIO(descriptor)


def free_bytes(place: str | int | os.PathLike[str]) -> int:
    """Bytes that root may still use on the file system of a path or an open file. Raises OSError."""
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def space_taken(paths: Iterable[str | os.PathLike[str]]) -> tuple[int, int]:
    """The bytes on disk, without holes, and inodes of these files and directories. Counts hard links once, and files that
    are gone as nothing."""
    taken: dict[tuple[int, int], int] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(path)
            taken[found.st_dev, found.st_ino] = found.st_blocks * _BLOCK
    return sum(taken.values()), len(taken)


def mountpoint(directory: str | os.PathLike[str]) -> str:
    """The mount point of the file system that holds, or will hold, the directory: the highest parent on the same device."""
    here = Path(directory).resolve()
    while not here.exists():
        here = here.parent
    device = here.stat().st_dev
    while here != here.parent and here.parent.stat().st_dev == device:
        here = here.parent
    return str(here)


class FileLocked(Exception):
    """Another process has the lock; `holder` is its process id, 0 if unknown."""

    def __init__(self, holder: int) -> None:
        super().__init__(f"held by process {holder}")
        self.holder = holder


def lock_file(path: str) -> int:
    """Takes the lock until the returned descriptor is closed. Makes the file if needed, and writes our process id into it. Raises
    FileLocked, OSError; PermissionError if another user made the file, or if it has another name too."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "it is not a lock file of this user's own", path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(descriptor)
        raise FileLocked(lock_holder(path)) from exc
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def lock_holder(path: str) -> int:
    """The process id in a lock's file; 0 unless that process has the file open, because the number may be stale or forged."""
    try:
        with open(path, encoding="ascii", opener=lambda name, flags: private(name, flags | os.O_NONBLOCK)) as file:
            pid = int(file.read(16) or 0)
            return pid if _has_open(pid, os.fstat(file.fileno())) else 0
    except (OSError, ValueError):
        return 0


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Raises OSError if there is no such process."""
    own = os.getpid() == pid
    links = f"/proc/{pid}/fd"
    found = 0
    for name in os.listdir(links):
        with contextlib.suppress(FileNotFoundError):  # just closed
            found += os.path.samestat(os.stat(f"{links}/{name}"), file)
    return found > own  # we have the file open ourselves


# Removing trees. QEMU and libvirt may add files meanwhile, so there are several attempts.
_ATTEMPTS: Final = 5
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOUNT_ID: Final = "mnt_id:"


def remove_tree(parent: str, name: str) -> None:
    """Removes `parent/name` and everything below it; no error if it is gone. Never follows symbolic links. Never removes
    anything in a mount, which may be a pod's volume: raises OSError, EXDEV or EBUSY, for a mount point.

    Mounts are recognized by the kernel's mount id, because a bind mount may have the same device number."""
    try:
        directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        for attempt in range(_ATTEMPTS):
            try:
                _remove_entry(name, directory, _mount_id(directory))
            except OSError as exc:
                if exc.errno != errno.ENOTEMPTY or attempt == _ATTEMPTS - 1:
                    raise
            else:
                return
    finally:
        os.close(directory)


def _remove_entry(name: str, directory: int, mount: str) -> None:
    """Removes `name` from the open directory, which is on `mount`."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=directory)
            return
        inside = os.open(name, _DIRECTORY, dir_fd=directory)
        try:
            # Checks the opened directory, so that a later mount over it cannot be entered.
            if _mount_id(inside) != mount:
                raise OSError(errno.EXDEV, f"{name} is a mount point; unmount it")
            for entry in os.listdir(inside):
                _remove_entry(entry, inside, mount)
        finally:
            os.close(inside)
        os.rmdir(name, dir_fd=directory)


def _mount_id(descriptor: int) -> str:
    """The mount that an open file is on."""
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file:
        for line in file:
            if line.startswith(_MOUNT_ID):
                return line.removeprefix(_MOUNT_ID).strip()
    raise OSError(errno.ENOTSUP, "the kernel does not say which mount a file is on")
