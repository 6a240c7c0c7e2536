"""The process that reads and writes volumes for `virtshim.moves.volume_process`.

A volume whose server is gone hangs any access to it. It hangs only this process, which the daemon can kill. The process loads
only the standard library and a few modules that need nothing else, so it starts fast.

Each line of standard input is an order, `[method of Tasks, argument ...]` as JSON. The answer is a line, `{"is": value}` or
`{"errno", "text"}`. Before it there is a line `.` for each part of a long task. The process ends with its input.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import json
import os
import signal
import stat
import sys

from virtshim.moves.fingerprints import look_at
from virtshim.system.files import free_bytes, replace_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_RECORD = "record"
_LOCK = "lock"
# Where files are kept until all of them are there.
_HALF = "state.half"
# Bytes. A record has two or three KiB.
_LONGEST = 1 << 20
# Entries of a VM's directory that are looked at, and files of a state that are removed. Tenants may put millions there.
_MOST_ENTRIES = 1000
_MOST_FILES = 100
_CHUNK = 4 << 20
# Bytes after which what is written goes to the disk, so that no part of a copy takes long.
_SYNCED = 64 << 20
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
# The errors for something else in place of a file or directory.
_ODD = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR})


class Tasks:
    """Tasks in one VM's directory on a volume. They follow no link there, because tenants may put links there. The orders
    `volume` and `lock` come first."""

    _root = -1
    _name = ""

    def volume(self, path: str) -> None:
        """Holds the volume open, so that it is not unmounted meanwhile."""
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def lock(self, name: str, make: bool) -> bool:
        """Keeps other nodes away while this process lives. False if another node is there. `make`: makes the directory. Without a
        directory there is nothing to protect."""
        self._name = name
        try:
            with self._inside(make=make) as inside:
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(_LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=inside))
                lock = _opened_regular(_LOCK, inside, os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def read(self) -> str | None:
        """The record in base64; one that is too long has one byte more than allowed. None if there is no record."""
        try:
            with self._inside() as inside, _opened_file(_RECORD, inside) as file:
                return base64.b64encode(file.read(_LONGEST + 1)).decode()
        except FileNotFoundError:
            return None

    def write(self, record: str) -> None:
        with self._inside(make=True) as inside:
            replace_bytes(f"/proc/self/fd/{inside}/{_RECORD}", base64.b64decode(record))

    def free_bytes(self) -> int:
        with self._inside(make=True) as inside:
            return free_bytes(inside)

    def remove_half(self) -> None:
        with self._inside(make=True):
            self._remove_folder(_HALF)

    def begin(self) -> None:
        with self._inside() as inside:
            os.mkdir(_HALF, 0o700, dir_fd=inside)

    def add(self, name: str, source: str) -> tuple[int, str]:
        """Size and digest of the file, whose copy is on the volume on return."""
        with self._inside(_HALF) as half, open(os.open(source, os.O_RDONLY | _SAFE), "rb") as read:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=half)
            with open(descriptor, "wb") as file:
                return _copy(read, file)

    def finish(self, generation: int) -> None:
        """The added files become those of that generation."""
        with self._inside() as inside:
            with self._inside(_HALF) as half:
                os.fsync(half)
            self._remove_folder(f"state-{generation}")
            os.rename(_HALF, f"state-{generation}", src_dir_fd=inside, dst_dir_fd=inside)
            os.fsync(inside)

    def fetch(self, generation: int, name: str, size: int, to: str) -> tuple[int, str] | None:
        """Size and digest of the copy on the node; None if the volume has no such file of that size."""
        try:
            with self._inside(f"state-{generation}") as folder:
                source = _opened_file(name, folder)
        except OSError as exc:
            if exc.errno in (errno.ENOENT, *_ODD):
                return None
            raise
        with source:
            if os.fstat(source.fileno()).st_size != size:
                return None
            with open(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                return _copy(source, file, size)

    def remove_file(self, generation: int, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._inside(f"state-{generation}") as folder:
            os.unlink(name, dir_fd=folder)

    def remove_others(self, generation: int) -> None:
        """Removes the files of all other generations."""
        with self._inside() as inside, os.scandir(inside) as entries:
            found = [entry.name for entry in itertools.islice(entries, _MOST_ENTRIES) if _is_folder(entry.name)]
        for name in found:
            if name != f"state-{generation}":
                with contextlib.suppress(OSError):  # a tenant has put something there
                    self._remove_folder(name)

    def fingerprint(self, path: str, is_file: bool) -> tuple[int, str, int, str]:
        """The fields of the `Fingerprint` of a disk on another volume."""
        return look_at(path, is_file=is_file)

    def _remove_folder(self, name: str) -> None:
        """Removes at most as many files as a VM has, because a tenant may have put millions there."""
        with contextlib.suppress(FileNotFoundError), self._inside() as inside:
            with self._inside(name) as folder, os.scandir(folder) as entries:
                for entry in itertools.islice(entries, _MOST_FILES):
                    os.unlink(entry.name, dir_fd=folder)
                    _tell_progress()
            os.rmdir(name, dir_fd=inside)

    @contextlib.contextmanager
    def _inside(self, folder: str = "", *, make: bool = False) -> Iterator[int]:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._name, 0o700, dir_fd=self._root)
                os.fsync(self._root)
        opened = os.open(self._name, os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=self._root)
        try:
            if folder:
                above, opened = opened, os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=opened)
                os.close(above)
            yield opened
        finally:
            os.close(opened)


def _is_folder(name: str) -> bool:
    """Whether the name is that of a generation's files."""
    number = name.removeprefix("state-")
    return number != name and number.isascii() and number.isdigit() and len(number) <= 20


def _opened_file(name: str, directory: int) -> IO[bytes]:
    return open(_opened_regular(name, directory, os.O_RDONLY), "rb")


def _opened_regular(name: str, directory: int, flags: int) -> int:
    """Raises OSError, with one of `_ODD` for what is no regular file. Looks first, because to open a device may do something."""
    found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(errno.ENXIO, "no regular file")
        return os.open(f"/proc/self/fd/{found}", flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    finally:
        os.close(found)


def _copy(source: IO[bytes], to: IO[bytes], most: int = 1 << 62) -> tuple[int, str]:
    """Size and digest. Leaves holes where the source has zeros. The copy is on disk on return. `most`: bytes after which it
    stops; a source that is longer then gives a wrong size."""
    digest, size, unsynced = hashlib.sha256(), 0, 0
    while size <= most and (data := source.read(_CHUNK)):
        digest.update(data)
        size += len(data)
        if data.count(0) == len(data):
            to.seek(len(data), os.SEEK_CUR)
        else:
            to.write(data)
            unsynced += len(data)
        if unsynced >= _SYNCED:
            to.flush()
            os.fdatasync(to.fileno())
            unsynced = 0
        _tell_progress()
    to.flush()
    os.ftruncate(to.fileno(), size)
    os.fsync(to.fileno())
    return size, digest.hexdigest()


def _tell_progress() -> None:
    _say(b".\n")


def _say(line: bytes) -> None:
    while line:
        line = line[os.write(1, line) :]


def _answer(tasks: Tasks, order: list[object]) -> dict[str, object]:
    try:
        return {"is": getattr(tasks, str(order[0]))(*order[1:])}
    except OSError as exc:
        return {"errno": exc.errno or errno.EIO, "text": exc.strerror or str(exc)}


def main(argv: list[str]) -> None:
    """`argv`: the number of the daemon's process."""
    ctypes.CDLL(None).prctl(
        _PR_SET_PDEATHSIG, signal.SIGKILL
    )  # a volume may hang this process when nobody is left to kill it
    if os.getppid() != int(argv[0]):
        return
    tasks = Tasks()
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            _say(json.dumps(_answer(tasks, json.loads(line))).encode() + b"\n")
