"""What was downloaded of contents whose download broke off, so that the next pull goes on there.

<directory>/<boot id>/<sha256 of the identity>     the bytes so far, as the source sends them

What a process has written outlives it. A machine that is switched off may lose any of it, so what another boot left is not used.
All of it is a copy: losing it costs a download.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from virtshim.domain.errors import DeadlineExceeded, Unavailable
from virtshim.files import free_bytes
from virtshim.machine import boot_id

# kubelet repeats a pull after 5 min at most, and an upgrade takes less.
KEPT_SECONDS = 3600.0
# So many times what is kept has to be free, for it is in the disk's way.
_ROOM = 4
_CHUNK = 1 << 18


class Partials:
    """Safe to use from many threads; one process owns the directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._own = directory / boot_id()
        self._busy: set[Path] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self, identity: str, size: int = 0) -> Iterator[Path | None]:
        """A file to write that content to, or go on with; None if another pull has it, or no room is to spare for `size` bytes.
        It is kept behind the block if that ends because the source, or the caller, gave up."""
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

    def forget_old(self, kept_seconds: float = KEPT_SECONDS) -> None:
        """What another boot left, and what nobody has gone on with for so long."""
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
        return not size or free_bytes(self._own) >= _ROOM * size

    def _drop(self, path: Path, is_ours: bool) -> None:
        if is_ours:
            path.unlink(missing_ok=True)


def kept(path: Path) -> Iterator[bytes]:
    """What the file has."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def also_written(chunks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """Passes the chunks on and appends them to the file, as long as that can be written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        whole = True
        for chunk in chunks:
            if whole and not (whole := _write(descriptor, chunk)):
                # Nothing can go on from here, and the disk itself needs the room.
                os.ftruncate(descriptor, 0)
            yield chunk
    finally:
        os.close(descriptor)


def _write(descriptor: int, chunk: bytes) -> bool:
    try:
        return os.write(descriptor, chunk) == len(chunk)
    except OSError:
        return False
