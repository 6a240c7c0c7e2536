"""Writes the files of an image as entries from the child that reads its layers (`virtshim.images.confined.contents`).

The names are untrusted, and the child may have been taken over. So each path is opened from one directory, component by
component, without following links. Existing files are never written to. Only directories, plain files, symbolic links and hard
links are made. Set-user-ID and set-group-ID bits and extended attributes are dropped, so that the node has no untrusted program
that runs as root. Only root can enter the directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import stat
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from virtshim.images.confined import frames
from virtshim.images.confined.frames import ASIDE, MOST_DEPTH, MOST_ENTRIES, ROOT
from virtshim.images.downloads.room import Share
from virtshim.images.oci_manifest import Descriptor
from virtshim.model.errors import InternalError, ResourceExhausted, ShimError
from virtshim.model.text import escaped
from virtshim.system.files import OUT_OF_SPACE, free_bytes, remove_tree

# The directories above the next entry stay open, so that entries of one directory need no walk from the top.

_PATH_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# How many directories may be opened: a fixed number, plus some per entry. Real archives list a directory's entries together.
_ONCE, _EACH = 50_000, 16


class TooManySteps(Exception):
    """The entries are in an order that is made to waste processor time."""


@dataclass(slots=True)
class _Open:
    name: str
    descriptor: int
    mtime_ns: int


class Directories:
    """Opens directories below `base`, without following links."""

    def __init__(self, base: int, *, keeps_times: bool) -> None:
        """The caller closes `base`. `keeps_times`: a directory that is left gets back the time that it had when it was
        entered."""
        self._base = base
        self._keeps_times = keeps_times
        self._open: list[_Open] = []
        self._steps = _ONCE

    def enter(self, names: tuple[str, ...]) -> int:
        """The descriptor of a directory, which the caller must not close. Raises OSError, TooManySteps."""
        self._steps += _EACH
        same = 0
        while same < min(len(names), len(self._open)) and names[same] == self._open[same].name:
            same += 1
        self.leave(same)
        for name in names[same:]:
            self._steps -= 1
            if self._steps < 0:
                raise TooManySteps
            descriptor = os.open(name, _PATH_DIRECTORY, dir_fd=self._last)
            self._open.append(_Open(name, descriptor, os.fstat(descriptor).st_mtime_ns))
        return self._last

    def leave(self, depth: int = 0) -> None:
        """Leaves all deeper directories. Raises OSError."""
        while len(self._open) > depth:
            left = self._open.pop()
            os.close(left.descriptor)
            if self._keeps_times:
                times = (left.mtime_ns, left.mtime_ns)
                os.utime(left.name, ns=times, dir_fd=self._last, follow_symlinks=False)

    def close(self) -> None:
        """Leaves all directories without restoring times."""
        self._keeps_times = False
        self.leave()

    @property
    def _last(self) -> int:
        return self._open[-1].descriptor if self._open else self._base


DISK = "disk"
"""A hard link to the disk, beside the files, if the disk is one of them."""

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT_MODE = 0o1777
# Limit of a path in an entry, because paths of the disk are kept in memory until the disk is stored.
_LONGEST_PATH = 4096
_MOST_OWNER, _LATEST = (1 << 32) - 2, (1 << 33) - 1
# An entry of the image needs up to three frames: itself, removing the one it replaces, removing a file kept aside.
_MOST_FRAMES = 3 * MOST_ENTRIES
_MOST_DISK_NAMES = 1000
# One in _FREE_INODES of the file system's inodes must stay free, checked every _INODE_CHECKS entries.
_FREE_INODES, _INODE_CHECKS = 20, 1024
_TOO_MANY_STEPS = "its files are in an order that takes too long to unpack"
_ZEROS = bytes(1 << 20)
# File names of raw disks.
_MAY_BE_HOLES = re.compile(r"\.(?:img|raw)$")
# Errors that bad names can cause. All other errors are faults of the node.
_UNFIT = frozenset(
    (
        errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENAMETOOLONG,
        errno.EINVAL, errno.EILSEQ, errno.EPERM,
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry from the child. `parts`: of its path; the first is ROOT or ASIDE. `more`, `size`: depend on `kind`."""

    kind: str
    parts: tuple[str, ...]
    mode: int
    owner: int
    group: int
    mtime: int
    more: str
    size: int


class TreeWriter:
    """A context manager. The caller moves or removes the files. `refused`: why the files cannot be a volume; further entries are
    then ignored."""

    def __init__(self, place: Path, name: str, max_bytes: int, room: Share) -> None:
        """`place`: the directory to make. `max_bytes`: limit of all files together. `room`: the pull's share of the free disk
        space."""
        self.place = place
        self.refused = ""
        self.size = 0
        self.entries = 0
        self._name = name
        self._max_bytes = max_bytes
        self._room = room
        place.mkdir(0o700)
        self._base = os.open(place, os.O_PATH | _DIRECTORY)
        self._parents = Directories(self._base, keeps_times=True)
        self._named = Directories(self._base, keeps_times=False)
        for part, mode in ((ROOT, 0o755), (ASIDE, 0o700)):
            os.mkdir(part, dir_fd=self._base)
            os.chmod(place / part, mode)
        # The file that is being written: its descriptor, bytes left, time of change, position.
        self._file = -1
        self._left = self._mtime = self._at = 0
        # Twice the child's limit, because a link has two paths.
        self._depth_left = 2 * frames.DEPTH_ONCE
        # Paths of the disk; a dict keeps their order.
        self._disks: dict[str, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(os.close, self._base)
            closing.callback(self._named.close)
            closing.callback(self._parents.close)
            closing.callback(self._end_file)
            self._room.release(self)

    def expect(self, size: int) -> None:
        """The source will send `size` bytes that take at least as much space on disk. Raises ResourceExhausted if they do not
        fit."""
        if not self._room.expect(self, size, free_bytes(self._base)):
            raise self._no_room()

    def came(self, size: int) -> None:
        """`size` of the expected bytes arrived."""
        self._room.came(self, size)

    def tell(self, payload: bytes) -> None:
        """Handles one entry. Raises ShimError for faults of the node and for invalid entries."""
        if self.refused:
            return
        self._depth_left += 2 * frames.DEPTH_EACH - payload.count(b"/")
        if self._depth_left < 0:
            self.refuse("it holds too many deeply nested directories")
            return
        try:
            entry = _parse(payload)
        except ValueError as exc:
            raise self._invalid_data() from exc
        if self._left:
            raise self._invalid_data()
        self.entries += 1
        if self.entries > _MOST_FRAMES or len(entry.parts) > MOST_DEPTH + 1:
            self.refuse("it holds too many files")
            return
        if self.entries % _INODE_CHECKS == 0 and not self._has_inodes():
            raise self._no_room()
        try:
            self._make(entry)
        except TooManySteps:
            self.refuse(_TOO_MANY_STEPS)
        except OSError as exc:
            self._failed(exc, "/".join(entry.parts))

    def write(self, data: bytes) -> None:
        """Writes bytes of the file of the last entry. Zeros become a hole."""
        if self.refused:
            return
        if self._file < 0 or len(data) > self._left:
            raise self._invalid_data()
        self.size += len(data)
        try:
            if data == _ZEROS[: len(data)]:
                os.lseek(self._file, len(data), os.SEEK_CUR)
            else:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._file, view) :]
            self._room.wrote(self, len(data))
            self._left -= len(data)
            self._at += len(data)
            if not self._left:
                os.ftruncate(self._file, self._at)
                self._end_file()
        except OSError as exc:
            self._failed(exc, "")

    def refuse(self, why: str) -> None:
        """Gives the files up and removes those written so far."""
        self.refused = self.refused or why
        self._room.release(self)
        self._left = 0
        self._end_file()
        self._disks.clear()
        for one in (self._parents, self._named):
            one.close()
        for part in (ROOT, ASIDE):
            remove_tree(str(self.place), part)

    def finish(self, disk: str = "") -> None:
        """Links the disk and flushes all files. `disk`: the stored disk. Raises FileNotFoundError if it is gone, otherwise
        ShimError."""
        if self._left:
            raise self._invalid_data()
        if self._disks and not disk:
            raise self._invalid_data()
        try:
            for path in self._disks:
                directory, name = self._open_parent(_parts(path))
                os.link(disk, name, dst_dir_fd=directory)
            if self._disks:
                os.link(disk, DISK, dst_dir_fd=self._base)
            self._named.close()
            self._parents.leave()
            remove_tree(str(self.place), ASIDE)
            if self.size:
                _sync_file_system(self._base)
        except FileNotFoundError:
            raise
        except TooManySteps:
            self.refuse(_TOO_MANY_STEPS)
        except OSError as exc:
            self._failed(exc, "")

    def add_disk(self, path: str) -> None:
        """Adds a path at which the disk will be linked."""
        self._disks[path] = None
        if len(self._disks) > _MOST_DISK_NAMES:
            self.refuse(f"its disk has more than {_MOST_DISK_NAMES} names")

    def _make(self, entry: _Entry) -> None:
        directory, name = self._open_parent(entry.parts)
        if entry.kind == "d":
            self._make_directory(directory, name, entry)
        elif entry.kind == "f" and self.size + entry.size > self._max_bytes:
            self.refuse(f"its files are larger than {self._max_bytes} bytes, this node's limit (images.max_bytes)")
        elif entry.kind == "f":
            self._reserve(name, entry.size)
            self._file = os.open(name, _NEW_FILE, 0o600, dir_fd=directory)
            self._left, self._at, self._mtime = entry.size, 0, entry.mtime
            _set_owner_and_mode(self._file, entry)
            if not entry.size:
                self._end_file()
        elif entry.kind == "l":
            os.symlink(entry.more, name, dir_fd=directory)
            if os.geteuid() == 0:
                os.chown(name, entry.owner, entry.group, dir_fd=directory, follow_symlinks=False)
            os.utime(name, (entry.mtime, entry.mtime), dir_fd=directory, follow_symlinks=False)
        elif entry.kind == "h":
            self._make_link(directory, name, "/".join(entry.parts), entry.more)
        elif entry.kind == "x":
            self.add_disk("/".join(entry.parts))
        elif "/".join(entry.parts) in self._disks:
            del self._disks["/".join(entry.parts)]
        else:
            self._unmake(directory, name)

    def _reserve(self, name: str, size: int) -> None:
        known = 0 if may_be_holes(name) else size
        if not self._room.promise(self, known, free_bytes(self._base)):
            raise self._no_room()

    def _unmake(self, directory: int, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # a hard link whose target has not come yet
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            os.unlink(name, dir_fd=directory)
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                self.size -= found.st_size

    def _make_directory(self, directory: int, name: str, entry: _Entry) -> None:
        with contextlib.suppress(FileExistsError):  # made for an entry in it; the open below refuses a non-directory
            os.mkdir(name, 0o700, dir_fd=directory)
        descriptor = os.open(name, os.O_RDONLY | _DIRECTORY, dir_fd=directory)
        try:
            _set_owner_and_mode(descriptor, entry)
        finally:
            os.close(descriptor)
        os.utime(name, (entry.mtime, entry.mtime), dir_fd=directory, follow_symlinks=False)

    def _make_link(self, directory: int, name: str, path: str, named: str) -> None:
        if named in self._disks:
            self.add_disk(path)
            return
        *above, source_name = _parts(named)
        source = self._named.enter(tuple(above))
        if stat.S_ISDIR(os.stat(source_name, dir_fd=source, follow_symlinks=False).st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        os.link(source_name, name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)

    def _open_parent(self, parts: tuple[str, ...]) -> tuple[int, str]:
        """The parent directory, which the caller must not close, and the name in it. Follows no link."""
        return self._parents.enter(parts[:-1]), parts[-1]

    def _has_inodes(self) -> bool:
        """Whether enough inodes are free. True for file systems that do not count them."""
        found = os.fstatvfs(self._base)
        return not found.f_files or found.f_favail > found.f_files // _FREE_INODES

    def _end_file(self) -> None:
        if self._file >= 0:
            descriptor, self._file = self._file, -1
            try:
                os.utime(descriptor, (self._mtime, self._mtime))
            finally:
                os.close(descriptor)

    def _failed(self, exc: OSError, path: str) -> None:
        if exc.errno in OUT_OF_SPACE:
            raise self._no_room() from exc
        if exc.errno not in _UNFIT:
            raise InternalError(f"image {self._name!r}: its files cannot be written: {exc.strerror}") from exc
        self.refuse(f"{escaped(path.partition('/')[2], 200)} cannot be made: {exc.strerror}")

    def _invalid_data(self) -> InternalError:
        return InternalError(
            f"image {self._name!r}: the child that unpacks its layers sent invalid data; pull it again"
        )

    def _no_room(self) -> ShimError:
        return ResourceExhausted(f"image {self._name!r} does not fit on this node's image file system; free some space")


def may_be_holes(name: str) -> bool:
    """Whether a file of this name may take less space than its size."""
    return _MAY_BE_HOLES.search(name) is not None


def _parse(payload: bytes) -> _Entry:
    """Raises ValueError."""
    kind, path, *numbers, more = frames.parse_names(payload)
    mode, owner, group, mtime = map(int, numbers)
    size = int(more) if kind == "f" else 0
    if kind not in ("d", "f", "l", "h", "x", "u") or min(mode, owner, group, mtime, size) < 0:
        raise ValueError(kind)
    if max(owner, group) > _MOST_OWNER or mtime > _LATEST:
        raise ValueError("a number that no file has")
    if kind == "h":
        _parts(more)
    return _Entry(kind, _parts(path), mode & _KEPT_MODE, owner, group, mtime, more, size)


def _parts(path: str) -> tuple[str, ...]:
    """Raises ValueError for a path that is too long, or not below ROOT or ASIDE."""
    if len(path) > _LONGEST_PATH:
        raise ValueError(path[:_LONGEST_PATH])
    parts = tuple(path.split("/"))
    if parts[0] not in (ROOT, ASIDE) or not {"", ".", ".."}.isdisjoint(parts) or path == ASIDE:
        raise ValueError(path)
    return parts


def _set_owner_and_mode(descriptor: int, entry: _Entry) -> None:
    """Only root can change the owner."""
    if os.geteuid() == 0:
        os.fchown(descriptor, entry.owner, entry.group)
    os.fchmod(descriptor, entry.mode)


def _sync_file_system(descriptor: int) -> None:
    """Flushes the whole file system, which is one wait for all files."""
    copied = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(copied) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(copied)


# The files of an OCI artifact: each layer is a file, named by its title.

_MODE = 0o644
_DIRECTORY_MODE = 0o755


def artifact_files_add(tree: TreeWriter, layer: Descriptor, chunks: Generator[bytes, None, None]) -> None:
    """Writes a layer as a file. Raises what `chunks` and the writer raise."""
    path = _prepare(tree, layer)
    if path:
        tree.tell(_entry_payload("f", path, _MODE, str(layer.size)))
    with contextlib.closing(chunks):
        for chunk in chunks:
            tree.write(chunk)


def artifact_files_add_disk(tree: TreeWriter, layer: Descriptor) -> None:
    """Adds a layer that is the disk. It is linked when the disk is stored."""
    if path := _prepare(tree, layer):
        tree.add_disk(path)


def _prepare(tree: TreeWriter, layer: Descriptor) -> str:
    """Makes the layer's parent directories. Returns its path, "" if it is refused. A layer without title is named by its digest,
    as in CRI-O."""
    title = layer.title.encode(errors="replace").decode()
    parts = [part for part in title.split("/") if part not in ("", ".")] or [layer.digest.partition(":")[2]]
    if ".." in parts or "\0" in title:
        tree.refuse(f"it holds the title {title!a}, which contains '..'")
        return ""
    for depth in range(1, len(parts)):
        tree.tell(_entry_payload("d", "/".join((ROOT, *parts[:depth])), _DIRECTORY_MODE))
    return "/".join((ROOT, *parts))


def _entry_payload(kind: str, path: str, mode: int, more: str = "") -> bytes:
    return frames.names(kind, path, str(mode), "0", "0", "0", more)
