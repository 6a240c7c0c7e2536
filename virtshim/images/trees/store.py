"""Stores images' files for volumes. Each image has a directory, named by a digest of its origin.

<directory>/          0700, so that nobody on the node can run a program from an image
  <hex>/root          the root directory of the image
  <hex>/disk          a hard link to the disk, if the disk is one of the files
  <hex>/use           the space that the files take without the disk; written last
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

# The space that an image's files take is counted once, when they are complete. kubelet asks for it every few seconds, and
# walking through all files each time would take too long.

_USE_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK = 512  # the unit of st_blocks


@dataclass(frozen=True, slots=True)
class Use:
    """`size`: the files' bytes as readers see them. `taken`: bytes on disk, without holes. A disk among the files is not
    included, because the image store counts it."""

    size: int
    inodes: int
    taken: int


def write_use(use: Use, file: Path) -> None:
    """Raises OSError."""
    replace_text(str(file), f"{use.size} {use.inodes} {use.taken}\n")


def read_use(file: Path) -> Use:
    """Raises OSError. A file of an earlier version does not have `taken`."""
    try:
        size, inodes, *taken = map(int, file.read_text().split())
    except ValueError as exc:
        raise OSError(errno.EIO, "it is damaged") from exc
    return Use(size, inodes, taken[0] if taken else size)


def counted(place: Path) -> tuple[int, int]:
    """Bytes on disk and inodes of a directory and everything below it. Hard links count once. Works for trees whose paths are
    longer than the kernel allows. Raises OSError."""
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
    for name in directories:  # after the scan is closed, so that each level needs one descriptor only
        inside = os.open(name, _USE_DIRECTORY, dir_fd=directory)
        try:
            _count(inside, taken)
        finally:
            os.close(inside)


log = structlog.get_logger(__name__)

_HEX = re.compile(r"[0-9a-f]{64}")
_USE = "use"
_STORE_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# The kernel's own limit.
_MOST_LINKS = 40


def tree_of(origin: str) -> ImageDigest:
    """The name of an image's tree. `origin`: the kind of source, so that content of one kind cannot pass for another, and the
    source's identity."""
    return ImageDigest(f"sha256:{hashlib.sha256(f'files of {origin}'.encode(errors='replace')).hexdigest()}")


def digests_in(directory: Path) -> frozenset[ImageDigest]:
    """The digests that are names in a directory; none if it is missing."""
    with contextlib.suppress(FileNotFoundError):
        return frozenset(ImageDigest(f"sha256:{name}") for name in os.listdir(directory) if _HEX.fullmatch(name))
    return frozenset()


class Trees:
    """Thread-safe."""

    def __init__(self, directory: Path, incoming: Path) -> None:
        self.directory = directory
        self._incoming = incoming

    def stored(self) -> frozenset[ImageDigest]:
        return digests_in(self.directory)

    def has(self, tree: ImageDigest | None) -> bool:
        return tree is not None and self._place(tree).is_dir()

    def size(self, tree: ImageDigest) -> int:
        """Bytes in the tree's files. Raises OSError."""
        return self._use(tree).size

    def publish(self, written: TreeWriter | None, tree: ImageDigest, image: str, disk: str) -> None:
        """Stores the written files, unless the tree exists already. `disk`: the stored disk. Raises InvalidRequest for files that
        cannot be a volume, FileNotFoundError if the disk is gone, OSError, ShimError."""
        if written is None:
            raise InternalError(f"image {image!r}: its source sent no files; pull it again")
        if not written.refused:
            written.finish(disk)
        if written.refused:
            raise InvalidRequest(f"image {image!r} cannot be a volume: {written.refused}; correct it and push it again")
        write_use(_use_of(written), written.place / _USE)
        try:
            written.place.rename(self._place(tree))
        except OSError as exc:
            if exc.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        sync(self.directory)

    def delete(self, tree: ImageDigest) -> None:
        """Deletes the tree in a thread, so that the caller does not wait. Files that the thread cannot delete are deleted at
        the next start. No error if the tree is missing. Raises OSError."""
        name = secrets.token_hex(16)
        with contextlib.suppress(FileNotFoundError):
            self._place(tree).rename(self._incoming / name)
            try:
                threading.Thread(target=self._remove, args=(name,), name="image-files-removal", daemon=True).start()
            except RuntimeError:  # no thread could be started
                self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            remove_tree(str(self._incoming), name)
        except OSError as exc:
            log.warning("image.files.not_removed", name=name, error=str(exc.strerror))

    def space(self, trees: Iterable[ImageDigest], beside: Iterable[str]) -> tuple[int, int]:
        """Bytes on disk and inodes of these trees and of the files `beside`. A disk that is in both counts once."""
        trees = set(trees)
        used, inodes = space_taken(itertools.chain(beside, (str(self._place(tree) / DISK) for tree in trees)))
        for tree in trees:
            with contextlib.suppress(OSError):
                use = self._use(tree)
                used, inodes = used + use.taken, inodes + use.inodes
        return used, inodes

    def beside(self, above: Path) -> Iterator[str]:
        """All paths below `above`, without the trees."""
        for directory, directories, names in os.walk(above):
            if directory == str(self.directory):
                directories.clear()
            yield directory
            for name in names:
                yield f"{directory}/{name}"

    def path(self, tree: ImageDigest, below: str = "") -> str:
        """The path of the tree's root directory, or of the directory `below` it. Links are followed within the tree, so the
        path has none. Raises NotFound, InvalidRequest, InternalError."""
        root = self._place(tree) / ROOT
        try:
            directory = os.open(root, _STORE_DIRECTORY)
        except FileNotFoundError as exc:
            raise NotFound("its files are no longer on this node; pull it again") from exc
        except OSError as exc:
            raise InternalError(f"its files cannot be opened: {exc.strerror}") from exc
        try:
            inside = os.open(_followed(directory, below), _STORE_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                raise InternalError(f"its files cannot be opened: {exc.strerror}") from exc
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
        return read_use(self._place(tree) / _USE)


def _use_of(written: TreeWriter) -> Use:
    """`written` must be finished."""
    taken, inodes = counted(written.place)
    disk, names_disk = space_taken([written.place / DISK])
    return Use(written.size, inodes - names_disk + 1, taken - disk)  # + 1 for the file `use`


def _is_text(path: str) -> bool:
    """Whether the path is valid UTF-8, as records and other programs require."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _followed(root: int, path: str) -> str:
    """Resolves all links in `path`. Absolute links and `..` stay below `root`. Resolving step by step is safe, because the tree
    never changes. openat2 could do it in one call, but the unit's RestrictSUIDSGID blocks it. Raises OSError."""
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
            if exc.errno != errno.EINVAL:  # EINVAL: it is not a link
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
