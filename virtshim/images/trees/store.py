"""The files of images that pods may have as volumes: a directory each, by a digest of what they come from.

<directory>/          0700: set-user-ID or not, nobody on the node runs what is in there
  <hex>/root          what is at the top of the image
  <hex>/disk          the disk that is among these files, if one is: one of its names
  <hex>/use           what it takes, the disk not counted; written last
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from virtshim.images.confined.frames import ROOT
from virtshim.images.trees.writer import DISK, TreeWriter
from virtshim.model.errors import InternalError, InvalidRequest, NotFound
from virtshim.model.ids import ImageDigest
from virtshim.model.text import escaped
from virtshim.system.files import remove_tree, replace_text, space_taken, sync

# What the files of an image take, counted once, when they are complete: nobody walks through all files of all images
# every few seconds.

_USE_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
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
    directory = os.open(place, _USE_DIRECTORY)
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
        inside = os.open(name, _USE_DIRECTORY, dir_fd=directory)
        try:
            _count(inside, taken)
        finally:
            os.close(inside)


log = structlog.get_logger(__name__)

_HEX = re.compile(r"[0-9a-f]{64}")
_USE = "use"
_STORE_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# As many as the kernel follows.
_MOST_LINKS = 40


def tree_of(origin: str) -> ImageDigest:
    """The name of the files that an image has: `origin` is a word for what it comes from, so that nobody publishes one thing as
    another, and what tells it from all others of that kind."""
    return ImageDigest(f"sha256:{hashlib.sha256(f'files of {origin}'.encode(errors='replace')).hexdigest()}")


class Trees:
    """Safe to use from many threads."""

    def __init__(self, directory: Path, incoming: Path) -> None:
        self.directory = directory
        self._incoming = incoming

    def stored(self) -> frozenset[ImageDigest]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            return frozenset(ImageDigest(f"sha256:{entry.name}") for entry in entries if _HEX.fullmatch(entry.name))
        return frozenset()

    def has(self, tree: ImageDigest | None) -> bool:
        return tree is not None and self._place(tree).is_dir()

    def size(self, tree: ImageDigest) -> int:
        """Bytes in its files. Raises OSError."""
        return self._use(tree).size

    def publish(self, written: TreeWriter | None, tree: ImageDigest, image: str, disk: str) -> None:
        """Those that are there already stay. `disk`: the stored one. Raises InvalidRequest for those that no volume can have,
        FileNotFoundError if the disk is gone, OSError, ShimError."""
        if written is None:
            raise InternalError(f"image {image!r}: its source brought no files; pull it again")
        if not written.refused:
            written.finish(disk)
        if written.refused:
            raise InvalidRequest(f"image {image!r} cannot be a volume: {written.refused}; push it without")
        note(_use_of(written), written.place / _USE)
        try:
            written.place.rename(self._place(tree))
        except OSError as exc:
            if exc.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        sync(self.directory)

    def delete(self, tree: ImageDigest) -> None:
        """No error for what is gone. Nobody waits for many files to go: what is left of them then goes at the next start. Raises
        OSError."""
        name = secrets.token_hex(16)
        with contextlib.suppress(FileNotFoundError):
            self._place(tree).rename(self._incoming / name)
            try:
                threading.Thread(target=self._remove, args=(name,), name="image-files-removal", daemon=True).start()
            except RuntimeError:  # the system has no thread to give
                self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            remove_tree(str(self._incoming), name)
        except OSError as exc:
            log.warning("image.files.not_removed", name=name, error=str(exc.strerror))

    def space(self, trees: Iterable[ImageDigest], beside: Iterable[str]) -> tuple[int, int]:
        """Bytes on disk and inodes that these take with other files, a disk that is among both once."""
        trees = set(trees)
        used, inodes = space_taken(itertools.chain(beside, (str(self._place(tree) / DISK) for tree in trees)))
        for tree in trees:
            with contextlib.suppress(OSError):
                use = self._use(tree)
                used, inodes = used + use.taken, inodes + use.inodes
        return used, inodes

    def beside(self, above: Path) -> Iterator[str]:
        """All that is below `above`, these left out."""
        for directory, directories, names in os.walk(above):
            if directory == str(self.directory):
                directories.clear()
            yield directory
            for name in names:
                yield f"{directory}/{name}"

    def path(self, tree: ImageDigest, below: str = "") -> str:
        """Of the root directory, or of the one that `below` leads to in it, links and all; no link is in the path. Raises
        NotFound, InvalidRequest, InternalError."""
        root = self._place(tree) / ROOT
        try:
            directory = os.open(root, _STORE_DIRECTORY)
        except FileNotFoundError as exc:
            raise NotFound("its files are not on this node any more; pull it again") from exc
        except OSError as exc:
            raise InternalError(f"its files cannot be looked at: {exc.strerror}") from exc
        try:
            inside = os.open(_followed(directory, below), _STORE_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                raise InternalError(f"its files cannot be looked at: {exc.strerror}") from exc
            raise NotFound(f"it has no directory {escaped(below, 200)}; correct the volumeMount's subPath") from exc
        finally:
            os.close(directory)
        try:
            found = os.readlink(f"/proc/self/fd/{inside}")
        finally:
            os.close(inside)
        if not _is_text(found):
            name = escaped(found.removeprefix(f"{root}/"), 200)
            raise InvalidRequest(
                f"{escaped(below, 200)} leads to {name}, whose name is not UTF-8; name another directory in the volumeMount's "
                "subPath, or rename it in the image"
            )
        return found

    def _place(self, tree: ImageDigest) -> Path:
        return self.directory / tree.hex

    def _use(self, tree: ImageDigest) -> Use:
        return noted(self._place(tree) / _USE)


def _use_of(written: TreeWriter) -> Use:
    """It is finished."""
    taken, inodes = counted(written.place)
    disk, names_disk = space_taken([written.place / DISK])
    return Use(written.size, inodes - names_disk + 1, taken - disk)  # and the note itself


def _is_text(path: str) -> bool:
    """What is in records, and told to others, is text."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _followed(root: int, path: str) -> str:
    """Where `path` leads, with no link in it, `root` being what absolute links and `..` lead to. Nobody changes what is there, so
    it can be found out step by step: openat2 would do it at once, but RestrictSUIDSGID of the unit takes that away. Raises
    OSError."""
    found: list[str] = []
    left, links = path.split("/")[::-1], 0
    while left:
        part = left.pop()
        if part == "..":
            del found[-1:]
        if part in ("", ".", ".."):
            continue
        here = "/".join((*found, part))
        try:
            target = os.readlink(here, dir_fd=root)
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # of what is no link
                raise
            os.close(os.open(here, _STORE_DIRECTORY | os.O_NOFOLLOW, dir_fd=root))
            found.append(part)
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if target.startswith("/"):
            found.clear()
        left += target.split("/")[::-1]
    return "/".join(found) or "."
