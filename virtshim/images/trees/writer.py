"""Writes the files of an image as the child that reads its layers tells them (`virtshim.images.confined.contents`).

The child may have been taken over, and the names are strangers' in any case. So each is reached from the one directory, component
by component, over no link; nothing that is there is written to or followed; nothing but directories, plain files, links and
further names of these is made. Set-user-ID and set-group-ID bits, and extended attributes, are left out: the node shall keep no
program of a stranger's that runs as root. The directory is root's alone.
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
from virtshim.images.disk_writer import OUT_OF_SPACE
from virtshim.images.downloads.room import Share
from virtshim.images.oci_manifest import Descriptor
from virtshim.model.errors import InternalError, ResourceExhausted, ShimError
from virtshim.model.text import escaped
from virtshim.system.files import free_bytes, remove_tree

# The directories that lead to what is written next: they stay open, so that neighbours cost no walk from the top.

_DIRECTORIES_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Directories that may be opened for all entries, and for each. Archives list what is in a directory together.
_ONCE, _EACH = 50_000, 16


class TooManySteps(Exception):
    """Its entries are in an order that is made to keep a processor busy."""


@dataclass(slots=True)
class _Open:
    name: str
    descriptor: int
    mtime_ns: int


class Directories:
    """Below one directory, over no link."""

    def __init__(self, base: int, *, keeps_times: bool) -> None:
        """`base` stays its owner's. `keeps_times`: a directory that is left is as old as it was when it was entered, whatever was
        made in it."""
        self._base = base
        self._keeps_times = keeps_times
        self._open: list[_Open] = []
        self._steps = _ONCE

    def enter(self, names: tuple[str, ...]) -> int:
        """Its descriptor, ours to close. Raises OSError, TooManySteps."""
        self._steps += _EACH
        same = 0
        while same < min(len(names), len(self._open)) and names[same] == self._open[same].name:
            same += 1
        self.leave(same)
        for name in names[same:]:
            self._steps -= 1
            if self._steps < 0:
                raise TooManySteps
            descriptor = os.open(name, _DIRECTORIES_DIRECTORY, dir_fd=self._last)
            self._open.append(_Open(name, descriptor, os.fstat(descriptor).st_mtime_ns))
        return self._last

    def leave(self, depth: int = 0) -> None:
        """All that are deeper. Raises OSError."""
        while len(self._open) > depth:
            left = self._open.pop()
            os.close(left.descriptor)
            if self._keeps_times:
                times = (left.mtime_ns, left.mtime_ns)
                os.utime(left.name, ns=times, dir_fd=self._last, follow_symlinks=False)

    def close(self) -> None:
        """Nothing is made any more."""
        self._keeps_times = False
        self.leave()

    @property
    def _last(self) -> int:
        return self._open[-1].descriptor if self._open else self._base


DISK = "disk"
"""Beside the files: one more name of the disk among them, by which it is found."""

_WRITER_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT_MODE = 0o1777
# Bytes of a path, as they are told. A name of the disk is kept until that is there.
_LONGEST_PATH = 4096
_MOST_OWNER, _LATEST = (1 << 32) - 2, (1 << 33) - 1
# Of an entry: what it is, that another one in its place is gone, that what was kept aside is not needed.
_MOST_TOLD = 3 * MOST_ENTRIES
_MOST_DISK_NAMES = 1000
# Of the file system's inodes one in so many stays free; how often it is looked at.
_FREE_INODES, _INODES_LOOKED_AT = 20, 1024
_TOO_MANY_STEPS = "its files are in an order that takes too long to unpack"
_ZEROS = bytes(1 << 20)
# Raw disks.
_MAY_BE_HOLES = re.compile(r"\.(?:img|raw)$")
# What names can be wrong by; everything else is the node's own trouble.
_UNFIT = frozenset(
    (
        errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENAMETOOLONG,
        errno.EINVAL, errno.EILSEQ, errno.EPERM,
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Told:
    """`parts` of its path, the first one of the two directories; `more` and `size` by its kind."""

    kind: str
    parts: tuple[str, ...]
    mode: int
    owner: int
    group: int
    mtime: int
    more: str
    size: int


class TreeWriter:
    """A context manager; what is not moved away by then is for others to remove. `refused` says why these files are none that a
    volume can have; what comes after that is dropped."""

    def __init__(self, place: Path, name: str, max_bytes: int, room: Share) -> None:
        """`place` is made. `max_bytes`: of all files together. `room`: its pull's, of its file system."""
        self.place = place
        self.refused = ""
        self.size = 0
        self.entries = 0
        self._name = name
        self._max_bytes = max_bytes
        self._room = room
        place.mkdir(0o700)
        self._base = os.open(place, os.O_PATH | _WRITER_DIRECTORY)
        self._parents = Directories(self._base, keeps_times=True)
        self._named = Directories(self._base, keeps_times=False)
        for part, mode in ((ROOT, 0o755), (ASIDE, 0o700)):
            os.mkdir(part, dir_fd=self._base)
            os.chmod(place / part, mode)
        # The file that is being written, what is left of it, when it was changed, the last byte that was written.
        self._file = -1
        self._left = self._mtime = self._at = 0
        # Of what is told, with both names of a link.
        self._depth_left = 2 * frames.DEPTH_ONCE
        # Paths, in their order.
        self._disks: dict[str, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.release(self)
        self._end_file()
        self._parents.close()
        self._named.close()
        os.close(self._base)

    def expect(self, size: int) -> None:
        """Its source will send so many bytes of what does not become less on disk. Raises ResourceExhausted if they do not
        fit."""
        if not self._room.expect(self, size, free_bytes(self._base)):
            raise self._no_room()

    def came(self, size: int) -> None:
        """So many of these."""
        self._room.came(self, size)

    def tell(self, payload: bytes) -> None:
        """One of them. Raises ShimError for the node's own troubles, and for nonsense."""
        if self.refused:
            return
        self._depth_left += 2 * frames.DEPTH_EACH - payload.count(b"/")
        if self._depth_left < 0:
            self.refuse("it holds too many directories one in the other")
            return
        try:
            told = _parse(payload)
        except ValueError as exc:
            raise self._nonsense() from exc
        if self._left:
            raise self._nonsense()
        self.entries += 1
        if self.entries > _MOST_TOLD or len(told.parts) > MOST_DEPTH + 1:
            self.refuse("it holds too many files")
            return
        if self.entries % _INODES_LOOKED_AT == 0 and not self._has_inodes():
            raise self._no_room()
        try:
            self._make(told)
        except TooManySteps:
            self.refuse(_TOO_MANY_STEPS)
        except OSError as exc:
            self._failed(exc, "/".join(told.parts))

    def write(self, data: bytes) -> None:
        """Bytes of the file that was told last; zeros become a hole."""
        if self.refused:
            return
        if self._file < 0 or len(data) > self._left:
            raise self._nonsense()
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
        """What is there of them goes at once."""
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
        """Everything is on disk when this returns. `disk`: the file that the disk has become. Raises FileNotFoundError if that is
        gone, else ShimError."""
        if self._left:
            raise self._nonsense()
        if self._disks and not disk:
            raise self._nonsense()
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
                _sync_all_of(self._base)
        except FileNotFoundError:
            raise
        except TooManySteps:
            self.refuse(_TOO_MANY_STEPS)
        except OSError as exc:
            self._failed(exc, "")

    def add_disk(self, path: str) -> None:
        """One of its names among the files."""
        self._disks[path] = None
        if len(self._disks) > _MOST_DISK_NAMES:
            self.refuse(f"its disk has more than {_MOST_DISK_NAMES} names")

    def _make(self, told: _Told) -> None:
        directory, name = self._open_parent(told.parts)
        if told.kind == "d":
            self._make_directory(directory, name, told)
        elif told.kind == "f" and self.size + told.size > self._max_bytes:
            self.refuse(f"its files are larger than {self._max_bytes} bytes, this node's limit (images.max_bytes)")
        elif told.kind == "f":
            self._claim(name, told.size)
            self._file = os.open(name, _NEW_FILE, 0o600, dir_fd=directory)
            self._left, self._at, self._mtime = told.size, 0, told.mtime
            _give(self._file, told)
            if not told.size:
                self._end_file()
        elif told.kind == "l":
            os.symlink(told.more, name, dir_fd=directory)
            if os.geteuid() == 0:
                os.chown(name, told.owner, told.group, dir_fd=directory, follow_symlinks=False)
            os.utime(name, (told.mtime, told.mtime), dir_fd=directory, follow_symlinks=False)
        elif told.kind == "h":
            self._name_too(directory, name, "/".join(told.parts), told.more)
        elif told.kind == "x":
            self.add_disk("/".join(told.parts))
        elif "/".join(told.parts) in self._disks:
            del self._disks["/".join(told.parts)]
        else:
            self._unmake(directory, name)

    def _claim(self, name: str, size: int) -> None:
        known = 0 if may_be_holes(name) else size
        if not self._room.promise(self, known, free_bytes(self._base)):
            raise self._no_room()

    def _unmake(self, directory: int, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # it is still awaited
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            os.unlink(name, dir_fd=directory)
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                self.size -= found.st_size

    def _make_directory(self, directory: int, name: str, told: _Told) -> None:
        with contextlib.suppress(FileExistsError):  # told before, by what is in it; what is no directory is not opened
            os.mkdir(name, 0o700, dir_fd=directory)
        descriptor = os.open(name, os.O_RDONLY | _WRITER_DIRECTORY, dir_fd=directory)
        try:
            _give(descriptor, told)
        finally:
            os.close(descriptor)
        os.utime(name, (told.mtime, told.mtime), dir_fd=directory, follow_symlinks=False)

    def _name_too(self, directory: int, name: str, path: str, named: str) -> None:
        if named in self._disks:
            self.add_disk(path)
            return
        *above, source_name = _parts(named)
        source = self._named.enter(tuple(above))
        if stat.S_ISDIR(os.stat(source_name, dir_fd=source, follow_symlinks=False).st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        os.link(source_name, name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)

    def _open_parent(self, parts: tuple[str, ...]) -> tuple[int, str]:
        """The directory that it is in, which is ours to close, and its name there. Over no link."""
        return self._parents.enter(parts[:-1]), parts[-1]

    def _has_inodes(self) -> bool:
        """Some file systems do not count them."""
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

    def _nonsense(self) -> InternalError:
        return InternalError(
            f"image {self._name!r}: the child that unpacks its layers sent invalid data; pull it again"
        )

    def _no_room(self) -> ShimError:
        return ResourceExhausted(f"image {self._name!r} does not fit on this node's image file system; free some space")


def may_be_holes(name: str) -> bool:
    """Whether what it takes on disk cannot be known by its size."""
    return _MAY_BE_HOLES.search(name) is not None


def _parse(payload: bytes) -> _Told:
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
    return _Told(kind, _parts(path), mode & _KEPT_MODE, owner, group, mtime, more, size)


def _parts(path: str) -> tuple[str, ...]:
    """Raises ValueError for what is not below the two directories, or is longer than a path may be."""
    if len(path) > _LONGEST_PATH:
        raise ValueError(path[:_LONGEST_PATH])
    parts = tuple(path.split("/"))
    if parts[0] not in (ROOT, ASIDE) or not {"", ".", ".."}.isdisjoint(parts) or path == ASIDE:
        raise ValueError(path)
    return parts


def _give(descriptor: int, told: _Told) -> None:
    """Who is not root keeps what he makes."""
    if os.geteuid() == 0:
        os.fchown(descriptor, told.owner, told.group)
    os.fchmod(descriptor, told.mode)


def _sync_all_of(descriptor: int) -> None:
    """The file system that it is on: one wait for all files."""
    copied = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(copied) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(copied)


# An OCI artifact's files: its layers as they are, each under its title.

_MODE = 0o644
_DIRECTORY_MODE = 0o755


def artifact_files_add(tree: TreeWriter, layer: Descriptor, chunks: Generator[bytes, None, None]) -> None:
    """Raises what `chunks` and the writer raise."""
    path = _prepare(tree, layer)
    if path:
        tree.tell(_entry("f", path, _MODE, str(layer.size)))
    with contextlib.closing(chunks):
        for chunk in chunks:
            tree.write(chunk)


def artifact_files_add_disk(tree: TreeWriter, layer: Descriptor) -> None:
    """The disk is linked there when it is stored."""
    if path := _prepare(tree, layer):
        tree.add_disk(path)


def _prepare(tree: TreeWriter, layer: Descriptor) -> str:
    """Its path, whose directories are there; "" when it is refused. Without a title it is named by its digest, as CRI-O does."""
    title = layer.title.encode(errors="replace").decode()
    parts = [part for part in title.split("/") if part not in ("", ".")] or [layer.digest.partition(":")[2]]
    if ".." in parts or "\0" in title:
        tree.refuse(f"it holds the title {title!a}, which contains '..'")
        return ""
    for depth in range(1, len(parts)):
        tree.tell(_entry("d", "/".join((ROOT, *parts[:depth])), _DIRECTORY_MODE))
    return "/".join((ROOT, *parts))


def _entry(kind: str, path: str, mode: int, more: str = "") -> bytes:
    return frames.names(kind, path, str(mode), "0", "0", "0", more)
