"""Directories removed with all below them, and nothing that is mounted there: it may be a pod's volume.

Mounts are told by the kernel's mount id. A device number does not tell them: a bind of a directory has that of the file system
which it is a part of.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

# What the rooms that keep files do alike: make sure of them, replace them whole, count what they take.

_BLOCK = 512  # the unit of st_blocks, whatever the file system's own is
_SYNC_FILE_RANGE_WRITE = 2


def sync(path: str | os.PathLike[str]) -> None:
    """A file's content, or a directory's names, are on disk when it returns. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin_sync(descriptor: int, first: int, count: int) -> None:
    """These bytes begin their way to the disk; nobody waits for them, and a later fsync is the shorter. Nothing where the file
    system, or the C library, knows no such wish."""
    if (ask := _sync_file_range()) is not None:
        ask(descriptor, first, count, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


def replace_text(path: str, text: str, mode: int = 0o600) -> None:
    """The file has this text and no other, or what it had before; on disk when it returns. `mode` for a new one, less the umask.
    Raises OSError."""
    replace_bytes(path, text.encode(), mode)


def replace_bytes(path: str, content: bytes, mode: int = 0o600) -> None:
    """As `replace_text`."""
    new = f"{path}.new"
    # What a killed process left there goes; what somebody put there, a link maybe, is never written to.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync(os.path.dirname(path) or ".")


def free_bytes(place: str | int | os.PathLike[str]) -> int:
    """For root, on the file system of a path or an open file. Raises OSError."""
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def space_taken(paths: Iterable[str | os.PathLike[str]]) -> tuple[int, int]:
    """Bytes on disk, holes not counted, and inodes of these files and directories, of a file by several names once; what is gone
    meanwhile takes none."""
    taken: dict[tuple[int, int], int] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(path)
            taken[found.st_dev, found.st_ino] = found.st_blocks * _BLOCK
    return sum(taken.values()), len(taken)


def mountpoint(directory: str | os.PathLike[str]) -> str:
    """Where the file system that holds it, or will, is mounted: the highest parent that is on the same device."""
    here = Path(directory).resolve()
    while not here.exists():
        here = here.parent
    device = here.stat().st_dev
    while here != here.parent and here.parent.stat().st_dev == device:
        here = here.parent
    return str(here)


class FileLocked(Exception):
    """Another process holds it; `holder` is that process's id, 0 if it is not known."""

    def __init__(self, holder: int) -> None:
        super().__init__(f"held by process {holder}")
        self.holder = holder


def lock_file(path: str) -> int:
    """A descriptor that holds the lock until it is closed; the file, made if missing, then has our process id. Raises FileLocked,
    OSError; PermissionError for a file that another user made, or that has another name too."""
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
    """The process id in a lock's file, if that process has the file open; 0 otherwise: what is written there may be old, or
    somebody else's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, encoding="ascii") as file:
            pid = int(file.read(16) or 0)
            return pid if _has_open(pid, os.fstat(descriptor)) else 0
    except (OSError, ValueError):
        return 0


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Raises OSError if there is no such process."""
    own = os.getpid() == pid
    links = f"/proc/{pid}/fd"
    found = 0
    for name in os.listdir(links):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += os.path.samestat(os.stat(f"{links}/{name}"), file)
    return found > own  # we have it open to read it


# Others (QEMU, libvirt) may be adding files of their own meanwhile.
_ATTEMPTS: Final = 5
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOUNT_ID: Final = "mnt_id:"


def remove_tree(parent: str, name: str) -> None:
    """Removes `parent/name` and all below it; no error for what is gone already. A symbolic link is removed, never followed.
    Raises OSError: EXDEV or EBUSY for a mount point, whatever it is a mount of."""
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
    """`name` in the open directory, which is on that mount."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=directory)
            return
        inside = os.open(name, _DIRECTORY, dir_fd=directory)
        try:
            # Of what was opened: whatever is mounted over it later is not looked into.
            if _mount_id(inside) != mount:
                raise OSError(errno.EXDEV, f"{name} is a mount point; unmount it")
            for entry in os.listdir(inside):
                _remove_entry(entry, inside, mount)
        finally:
            os.close(inside)
        os.rmdir(name, dir_fd=directory)


def _mount_id(descriptor: int) -> str:
    """The kernel's number of the mount that an open file is on."""
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file:
        for line in file:
            if line.startswith(_MOUNT_ID):
                return line.removeprefix(_MOUNT_ID).strip()
    raise OSError(errno.ENOTSUP, "the kernel does not say which mount a file is on")
