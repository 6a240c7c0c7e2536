"""Directories removed with all below them, and nothing that is mounted there: it may be a pod's volume.

Mounts are told by the kernel's mount id. A device number does not tell them: a bind of a directory has that of the file system
which it is a part of.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Final

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
