"""Writes a downloaded disk to a file and computes its digest. Owns the open descriptor, but does not remove the file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from virtshim.images.confined.frames import QCOW_MAGIC
from virtshim.images.downloads.room import Share
from virtshim.model.errors import InternalError, InvalidRequest, ResourceExhausted
from virtshim.model.ids import ImageDigest
from virtshim.system.files import OUT_OF_SPACE, begin_sync, free_bytes

_ZEROS = bytes(1 << 18)
# Writing back during the download keeps the final fsync short.
_SYNC_EVERY = 16 << 20


class DiskWriter:
    """A context manager. `max_bytes`: of the largest disk allowed. If the file exists already, call `resume` or `restart` first.
    `room`: the pull's share of the free disk space."""

    def __init__(self, path: Path, name: str, max_bytes: int, room: Share) -> None:
        self.path = path
        self._name = name
        self._max_bytes = max_bytes
        self._hash = hashlib.sha256()
        self._size = self._syncing = 0
        self._room = room
        self._announced = 0
        self._first = b""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.release(self)
        os.close(self._fd)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._size

    def digest(self) -> ImageDigest:
        """The digest of all bytes so far."""
        return ImageDigest(f"sha256:{self._hash.hexdigest()}")

    def resume(self, progress: Callable[[], None]) -> None:
        """Continues after the bytes that the file has. Calls `progress` while it reads them."""
        self.restart(keep=True)
        while data := os.read(self._fd, len(_ZEROS)):
            self._remember_first(data)
            self._hash.update(data)
            self._size += len(data)
            progress()

    def restart(self, *, keep: bool = False) -> None:
        """Starts over. `keep`: the file's bytes stay."""
        self._hash, self._size, self._first = hashlib.sha256(), 0, b""
        self._syncing = 0
        os.lseek(self._fd, 0, os.SEEK_SET)
        if not keep:
            os.ftruncate(self._fd, 0)

    def expect(self, size: int) -> None:
        """The source announces `size` bytes in all. A qcow2 disk that cannot fit is refused at once. A raw disk is not, because
        most of it may be holes."""
        self._check_size(size)
        self._announced = size
        self._reserve()

    def write(self, data: bytes) -> None:
        """Appends `data`. If it is all zeros it becomes a hole."""
        self._check_size(self._size + len(data))
        if len(self._first) < len(QCOW_MAGIC):
            self._remember_first(data)
            self._reserve()
        self._hash.update(data)
        try:
            if data[:1] == b"\0" and data == _ZEROS[: len(data)]:
                os.lseek(self._fd, len(data), os.SEEK_CUR)
            else:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fd, view) :]
        except OSError as exc:
            raise self._write_error(exc) from exc
        self._size += len(data)
        self._room.wrote(self, len(data))
        if self._size - self._syncing >= _SYNC_EVERY:
            begin_sync(self._fd, self._syncing, self._size - self._syncing)
            self._syncing = self._size

    def finish(self) -> None:
        """Everything is on disk when this returns."""
        try:
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
        except OSError as exc:
            raise self._write_error(exc) from exc

    def _remember_first(self, data: bytes) -> None:
        self._first += data[: len(QCOW_MAGIC) - len(self._first)]

    def _reserve(self) -> None:
        left = self._announced - self._size
        if self._first == QCOW_MAGIC and left > 0 and not self._room.promise(self, left, free_bytes(self._fd)):
            raise self._no_room()

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise InvalidRequest(
                f"image {self._name!r} is larger than {self._max_bytes} bytes, this node's limit; "
                "use a smaller image or raise images.max_bytes"
            )

    def _write_error(self, exc: OSError) -> ResourceExhausted | InternalError:
        if exc.errno in OUT_OF_SPACE:
            return self._no_room()
        return InternalError(f"image {self._name!r} cannot be written: {exc.strerror}")

    def _no_room(self) -> ResourceExhausted:
        return ResourceExhausted(f"image {self._name!r} does not fit on this node's image file system; free some space")
