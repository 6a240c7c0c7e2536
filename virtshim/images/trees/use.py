"""What the files of an image take, counted once, when they are complete: nobody walks through all files of all images every few
seconds."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from virtshim.files import replace_text

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK = 512  # the unit of st_blocks


@dataclass(frozen=True, slots=True)
class Use:
    """`size` bytes are in the files, as whoever reads them sees; they take `taken` bytes on disk, holes not counted, and
    `inodes`. A disk among them is the store's, and counts there."""

    size: int
    inodes: int
    taken: int


def note(use: Use, file: Path) -> None:
    """Raises OSError."""
    replace_text(str(file), f"{use.size} {use.inodes} {use.taken}\n")


def noted(file: Path) -> Use:
    """An earlier version did not count what they take on disk. Raises OSError."""
    try:
        size, inodes, *taken = map(int, file.read_text().split())
    except ValueError as exc:
        raise OSError(errno.EIO, "it is damaged") from exc
    return Use(size, inodes, taken[0] if taken else size)


def counted(place: Path) -> tuple[int, int]:
    """Bytes on disk and inodes of a directory and all below it, of a file by several names once. Their names together may be
    longer than a path can be. Raises OSError."""
    taken: dict[int, int] = {}
    directory = os.open(place, _DIRECTORY)
    try:
        taken[os.fstat(directory).st_ino] = os.fstat(directory).st_blocks
        _count(directory, taken)
    finally:
        os.close(directory)
    return sum(taken.values()) * _BLOCK, len(taken)


def _count(directory: int, taken: dict[int, int]) -> None:
    directories = []
    with os.scandir(directory) as entries:
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            taken[found.st_ino] = found.st_blocks
            if stat.S_ISDIR(found.st_mode):
                directories.append(entry.name)
    for name in directories:  # one descriptor for each that this one is in, no more
        inside = os.open(name, _DIRECTORY, dir_fd=directory)
        try:
            _count(inside, taken)
        finally:
            os.close(inside)
