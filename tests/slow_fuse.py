"""A file system with one empty directory that stops answering on request, as an NFS server may. For root only."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

# linux/fuse.h
_LOOKUP, _FORGET, _GETATTR, _STATFS, _INIT, _OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = (
    1, 2, 3, 17, 26, 27, 28, 29, 36, 42,
)  # fmt: skip
_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_ENOENT, _ENOSYS = 2, 38
# ino, size, blocks, three times, their nanoseconds, mode, nlink, uid, gid, rdev, blksize, flags: a directory.
_ATTRIBUTES = struct.pack("<6Q3I7I", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)
_ANSWERS = {
    _GETATTR: struct.pack("<QII", 0, 0, 0) + _ATTRIBUTES,  # asked for anew each time
    _STATFS: struct.pack("<5Q4I24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0),
    _OPENDIR: struct.pack("<QII", 1, 0, 0),
    _READDIR: b"",
    _RELEASEDIR: b"",
}


class SlowFuse:
    """Mounted inside the block. `answers`: whether it answers at first. OSError without FUSE."""

    def __init__(self, directory: Path, *, answers: bool = True) -> None:
        self._directory = directory
        self._hangs = threading.Event()
        if not answers:
            self._hangs.set()

    def __enter__(self) -> Self:
        self._server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        options = f"fd={self._server},rootmode=40000,user_id=0,group_id=0,allow_other"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"virtshim-test", os.fsencode(self._directory), b"fuse", 0, options.encode()) != 0:
            os.close(self._server)
            raise OSError(ctypes.get_errno(), "no FUSE mount")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def hang(self) -> None:
        """Requests from now on are neither read nor answered."""
        self._hangs.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        os.close(self._server)  # all that waits gets an error
        subprocess.run(["umount", "-l", self._directory], check=False)

    def _serve(self) -> None:
        while not self._closing.is_set() and not self._hangs.is_set():
            if select.select([self._server], [], [], 0.05)[0] and not self._hangs.is_set():
                try:
                    request = os.read(self._server, 1 << 17)
                except OSError:  # withdrawn meanwhile; or nothing is mounted any more
                    continue
                self._answer(request)
        self._closing.wait()

    def _answer(self, request: bytes) -> None:
        _, code, unique, *_ = _IN.unpack_from(request)
        if code in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            return
        if code == _INIT:
            body = struct.pack("<IIIIHHIIHHI28x", 7, 31, 65536, 0, 12, 9, 65536, 1, 0, 0, 0)
        elif code in _ANSWERS:
            body = _ANSWERS[code]
        else:
            error = _ENOENT if code == _LOOKUP else _ENOSYS
            os.write(self._server, _OUT.pack(_OUT.size, -error, unique))
            return
        os.write(self._server, _OUT.pack(_OUT.size + len(body), 0, unique) + body)


def dead_directory(place: Path) -> Iterator[Path]:
    """For a fixture: a new directory whose server is gone. Skips the test where there is no FUSE."""
    place.mkdir()
    try:
        with SlowFuse(place, answers=False):
            yield place
    except OSError as exc:
        pytest.skip(f"NOT TO BE HAD HERE: {exc.strerror}")
