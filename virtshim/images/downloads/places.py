"""Where a pull writes its download, and where partial downloads are kept."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from virtshim.images.disk_writer import DiskWriter
from virtshim.images.downloads.room import Room, Share, Turns
from virtshim.images.pull_cache import StoredDiskLookup
from virtshim.images.trees.writer import TreeWriter
from virtshim.model.errors import DeadlineExceeded, InternalError, Unavailable
from virtshim.model.ids import ImageDigest
from virtshim.system.files import free_bytes, remove_tree
from virtshim.system.machine import boot_id

# Partial downloads, so that the next pull can continue.
#
# <directory>/<boot id>/<sha256 of the identity>     the bytes so far, as the source sends them
#
# They are not synced. They survive the process, but a power failure may damage them, so files of an earlier boot are not
# used. Losing them only costs a download.

# kubelet repeats a pull after 5 min at most, and an upgrade takes less.
PARTIALS_KEPT_SECONDS = 3600.0
# A partial copy is kept only if this many times its size is free, because the disk itself needs space too.
_FREE_SPACE_FACTOR = 4
_CHUNK = 1 << 18


class Partials:
    """Thread-safe. One process owns the directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._own = directory / boot_id()
        self._busy: set[Path] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self, identity: str, size: int = 0) -> Iterator[Path | None]:
        """A file to write the content to, which may have its first bytes already. None if another pull uses it, or if there is
        not enough space for `size` bytes. The file is kept if the block ends because the source failed or the pull was
        cancelled."""
        path = self._own / hashlib.sha256(identity.encode()).hexdigest()
        with self._lock:
            is_ours = path not in self._busy and self._has_room(size)
            if is_ours:
                self._busy.add(path)
        try:
            yield path if is_ours else None
        except (Unavailable, DeadlineExceeded):
            raise
        except BaseException:
            self._drop(path, is_ours)
            raise
        else:
            self._drop(path, is_ours)
        finally:
            with self._lock:
                self._busy -= {path} if is_ours else set()

    def make_directory(self) -> None:
        for directory in (self._directory, self._own):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def forget_old(self, kept_seconds: float = PARTIALS_KEPT_SECONDS) -> None:
        """Removes files of earlier boots, and files that no pull has written to for `kept_seconds`."""
        oldest = time.time() - kept_seconds
        with contextlib.suppress(FileNotFoundError):
            for directory in list(self._directory.iterdir()):
                if directory != self._own:
                    shutil.rmtree(directory, ignore_errors=True)
            with self._lock:
                for path in set(self._own.iterdir()) - self._busy:
                    if path.stat().st_mtime <= oldest:
                        path.unlink(missing_ok=True)

    def _has_room(self, size: int) -> bool:
        return not size or free_bytes(self._own) >= _FREE_SPACE_FACTOR * size

    def _drop(self, path: Path, is_ours: bool) -> None:
        if is_ours:
            path.unlink(missing_ok=True)


def kept(path: Path) -> Iterator[bytes]:
    """The bytes of the file."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def also_written(chunks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """Passes the chunks on, and appends them to the file as long as writing works."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        whole = True
        for chunk in chunks:
            if whole and not (whole := _write(descriptor, chunk)):
                # The partial copy is useless now, and the disk itself needs the space.
                os.ftruncate(descriptor, 0)
            yield chunk
    finally:
        os.close(descriptor)


def _write(descriptor: int, chunk: bytes) -> bool:
    try:
        return os.write(descriptor, chunk) == len(chunk)
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Ground:
    """The parts that all pulls share. `incoming`: the directory of unfinished files. `stored`: finds complete disks."""

    incoming: Path
    partials: Partials
    turns: Turns
    room: Room
    stored: StoredDiskLookup


class Landing:
    """The files of one pull. A context manager: on exit, pulls that wait for this one continue, and its files are removed, unless
    they were moved away or can be continued."""

    def __init__(self, ground: Ground, name: str, max_bytes: int) -> None:
        self._ground = ground
        self._name = name
        self._max_bytes = max_bytes
        self._held = contextlib.ExitStack()
        self._room = Share(ground.room)
        self._disk: DiskWriter | None = None
        self.files: TreeWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.__exit__(kind, error, trace)

    def claim(self, identity: str, waiting: Callable[[], None], source: str = "") -> ImageDigest | None:
        """The stored disk of this identity; None if this pull must download it. Waits for another pull that downloads it from
        the same source, and calls `waiting` meanwhile. Does not wait for pulls from another source, which may be very slow."""
        if (stored := self._ground.stored(identity)) is not None:
            return stored
        self._held.enter_context(self._ground.turns.taken(f"{source} {identity}", waiting))
        return self._ground.stored(identity)

    def disk(self, identity: str = "") -> DiskWriter:
        """Opens the disk's file for writing. With an identity, it may have its first bytes already."""
        path = self._held.enter_context(self._ground.partials.taken(identity)) if identity else None
        if path is None:
            path = self._ground.incoming / secrets.token_hex(16)
            self._held.callback(path.unlink, missing_ok=True)
        self._disk = self._held.enter_context(DiskWriter(path, self._name, self._max_bytes, self._room))
        return self._disk

    def beside(self) -> DiskWriter:
        """Opens a file for writing that is stored with the disk, such as a kernel."""
        path = self._ground.incoming / secrets.token_hex(16)
        self._held.callback(path.unlink, missing_ok=True)
        return self._held.enter_context(DiskWriter(path, self._name, self._max_bytes, self._room))

    def tree(self) -> TreeWriter:
        """The writer of the image's files."""
        name = secrets.token_hex(16)
        self._held.callback(remove_tree, str(self._ground.incoming), name)
        self.files = TreeWriter(self._ground.incoming / name, self._name, self._max_bytes, self._room)
        return self._held.enter_context(self.files)

    def finished(self) -> tuple[ImageDigest, Path]:
        """Flushes the complete disk. Returns its digest and its file."""
        if self._disk is None:
            raise InternalError(f"image {self._name!r}: its source sent no disk; pull it again")
        self._disk.finish()
        return self._disk.digest(), self._disk.path

    def part(self, identity: str, size: int) -> Path | None:
        """A file for the packed bytes from which the disk is unpacked; None if there is no space."""
        return self._held.enter_context(self._ground.partials.taken(identity, size))
