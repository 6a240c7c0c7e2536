"""The three files of one console: the raw log that QEMU writes, the CRI log, and the position up to which virtshim has
copied the one to the other.

Methods raise OSError, which the tail retries; only `LogFile.open` raises ShimErrors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import stat
from collections.abc import Iterator
from typing import Final, Self

from virtshim.logs.lines import ENCODED_BYTES, Position, decode, encode
from virtshim.model.errors import InternalError, InvalidRequest, ResourceExhausted, ShimError, WrongState
from virtshim.system.files import OUT_OF_SPACE, make_directory

# Errors of a log file that the pod's request or the machine causes, not a bug in virtshim.
_USER_ERRNOS: Final = (
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENAMETOOLONG, errno.ENXIO,
)  # fmt: skip
# Never wait for the other end of a FIFO, and never follow a link that somebody has put there.
_SAFE_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


# Space of the raw log is given back in pieces of this size (bytes).
_HOLE: Final = 1024 * 1024
# How many names of rotated raw logs may be missing before an existing one.
_GAPS: Final = 2
# Flags of fallocate(2). The standard library has only posix_fallocate(3), which cannot punch holes.
_KEEP_SIZE: Final = 0x01
_PUNCH_HOLE: Final = 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class _OwnedFile:
    """One descriptor, closed once."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor

    def close(self) -> None:
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)


class LogFile(_OwnedFile):
    """The CRI log, open for appending."""

    def __init__(self, descriptor: int, path: str, directory: str) -> None:
        super().__init__(descriptor)
        self._path = path
        self._directory = directory

    @classmethod
    def open(cls, path: str, directory: str = "") -> Self:
        """Opens the log. Makes a missing file (0640) and missing directories above it (0755). `directory` is kubelet's
        directory, "" for the file's own. Its path may contain links. Below it no link is followed, because a pod that
        mounts log directories can write there."""
        if not os.path.isabs(path):
            raise InvalidRequest(f"log file {path!r} is not an absolute path; correct log_directory and log_path")
        directory = directory or os.path.dirname(path)
        below, name = os.path.split(os.path.relpath(path, directory))
        with _as_user_error(f"log_directory {directory} cannot be made"):
            _make_directory(directory)
        with _as_user_error(f"log_path: {path} cannot be opened"), _directory_below(directory, below) as parent:
            log = cls(_open_log(name, parent), path, directory)
        if not stat.S_ISREG(os.fstat(log._fd).st_mode):
            log.close()
            raise InvalidRequest(f"log file {path} is not a regular file; remove it")
        return log

    def reopened(self) -> Self:
        """Opens a new file of the same name, after this one was renamed (log rotation)."""
        return self.open(self._path, self._directory)

    def status(self) -> os.stat_result:
        return os.fstat(self._fd)

    def append(self, text: bytes) -> None:
        """Appends all of `text`. After an error, a part of it may be in the log."""
        rest = memoryview(text)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def truncate_to(self, size: int) -> None:
        """Removes everything after the first `size` bytes. A shorter file stays as it is."""
        if os.fstat(self._fd).st_size > size:
            os.ftruncate(self._fd, size)


@contextlib.contextmanager
def _as_user_error(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _USER_ERRNOS:
            raise WrongState(f"{what}: {error.strerror}; correct the path, or remove what is in its place") from error
        raise user_error(what, error) from error


def _make_directory(path: str) -> None:
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o755)  # noqa: S103 (kubelet and log collectors read it), whatever the umask


@contextlib.contextmanager
def _directory_below(top: str, below: str) -> Iterator[int]:
    """Yields a descriptor of the directory `top`/`below`. Makes missing parts, and follows no link below `top`."""
    with contextlib.ExitStack() as opened:
        here = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, here)
        for part in filter(None, below.split("/")):
            made = False
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=here)
                made = True
            here = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _SAFE_FLAGS, dir_fd=here)
            opened.callback(os.close, here)
            if made:
                os.fchmod(here, 0o755)
        yield here


def _open_log(name: str, parent: int) -> int:
    flags = os.O_WRONLY | os.O_APPEND | _SAFE_FLAGS
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o640, dir_fd=parent)
        os.fchmod(descriptor, 0o640)
        return descriptor
    return os.open(name, flags | os.O_CREAT, 0o640, dir_fd=parent)


def user_error(what: str, error: OSError) -> ShimError:
    if error.errno == errno.ELOOP:
        return InvalidRequest(f"{what}: it is a symbolic link, which is not followed; remove it")
    if error.errno == errno.ENOTDIR:
        return InvalidRequest(f"{what}: a part of its path is a symbolic link or a file where a directory should be")
    if error.errno in OUT_OF_SPACE:
        return ResourceExhausted(f"{what}: {error.strerror}; free space on that file system")
    return InternalError(f"{what}: {error.strerror}")


class PositionFile(_OwnedFile):
    """The recorded position, overwritten in place."""

    @classmethod
    def open(cls, path: str) -> Self:
        """Makes the file and the container's directory if they are missing. The directory has mode 0711, because the
        QEMU user passes through it."""
        make_directory(os.path.dirname(path), 0o711)
        return cls(os.open(path, os.O_RDWR | os.O_CREAT | _SAFE_FLAGS, 0o600))

    def load(self) -> Position | None:
        """The saved position; None if none was saved, or if it is unreadable."""
        return decode(os.pread(self._fd, ENCODED_BYTES, 0))

    def save(self, position: Position) -> None:
        os.pwrite(self._fd, encode(position), 0)


class RawLog(_OwnedFile):
    """The raw log, to which QEMU appends. It may not exist yet. It can be opened again after `close`.

    With the system's libvirt, virtlogd writes the log. When the log is full, virtlogd renames it to `.0`, the old `.0`
    to `.1` and so on, and removes the last one. So this class identifies the files by inode."""

    def __init__(self, path: str) -> None:
        super().__init__(-1)
        self.path = path
        self._freed_to = 0

    def open(self, inode: int = 0) -> bool:
        """Opens the file with that `inode`, or the oldest file if no file has that inode. Returns whether a file is
        open."""
        if self._fd < 0 and (there := self._there()):
            self._take(next((one for one in there if one[1] == inode), there[0]))
        return self._fd >= 0

    def has_next(self) -> bool:
        """Whether a newer file exists. virtlogd then writes only to the newer file, and the open file is complete."""
        return self._next() is not None

    def go_on(self) -> bool:
        """Opens the next file instead of this one. Returns False if the next file has no name at this moment, because
        virtlogd is renaming it."""
        later = self._next()
        return later is not None and self._take(later)

    def _take(self, wanted: tuple[str, int]) -> bool:
        name, inode = wanted
        try:
            descriptor = os.open(name, os.O_RDWR | _SAFE_FLAGS)
        except FileNotFoundError:
            return False
        if os.fstat(descriptor).st_ino != inode:
            os.close(descriptor)
            return False
        self.close()
        self._fd, self._freed_to = descriptor, 0
        return True

    def _next(self) -> tuple[str, int] | None:
        mine, there = self.status().st_ino, self._there()
        at = next((at for at, (_, inode) in enumerate(there) if inode == mine), -1)  # removed: older than all others
        return there[at + 1] if at + 1 < len(there) else None

    def _there(self) -> list[tuple[str, int]]:
        """Names and inodes of the log's files, the oldest first. virtlogd renames the oldest file first, so for a moment
        a number is missing. A rename gives a file a higher number, and this loop goes from low to high numbers. So it misses no
        file, but it may find a file twice, the second time under its new name."""
        found: dict[int, str] = {}
        absent = 0
        for number in itertools.count(-1):
            name = self.path if number < 0 else f"{self.path}.{number}"
            try:
                found[os.lstat(name).st_ino] = name
                absent = 0
            except FileNotFoundError:
                absent += 1
            if absent > _GAPS:
                break
        return [(name, inode) for inode, name in reversed(found.items())]

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._fd, size, offset)

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def data_from(self, offset: int) -> int:
        """The position of the first byte from `offset` on whose space was not freed."""
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.EINVAL):  # at the end; a file system without holes
                return offset
            raise

    def free_before(self, end: int) -> None:
        """Frees the space before `end`, in large pieces. Offsets stay as they are. If the file system cannot do that,
        the space is freed with the container."""
        end -= end % _HOLE
        if end - self._freed_to >= _HOLE:
            punch_hole(self._fd, self._freed_to, end - self._freed_to)
            self._freed_to = end

    def status(self) -> os.stat_result:
        return os.fstat(self._fd)


def punch_hole(descriptor: int, offset: int, size: int) -> None:
    """Frees the space of `size` bytes from `offset` on. They then read as zeros, and the file keeps its length. Does
    nothing on a file system without holes. Raises OSError."""
    if _libc.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, size) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
