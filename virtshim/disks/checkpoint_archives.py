"""Archives of checkpoints: implements `virtshim.vm.ports.CheckpointFiles`.

A directory beside the archive collects all files, so the last step is a rename within one file system. The directory's name comes
from the container's id, so the leftovers of a killed process can be found.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from virtshim.model.errors import InternalError, InvalidRequest, ResourceExhausted
from virtshim.model.ids import ContainerId
from virtshim.system.files import OUT_OF_SPACE, private, sync

MANIFEST: Final = "checkpoint.json"

_ARCHIVE: Final = ".archive"
_PIECE: Final = 4 << 20
_FICLONE: Final = 0x40049409
# The file system cannot share blocks, or not between these two files.
_NO_CLONE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS})


def share_blocks(old: IO[bytes], new: IO[bytes]) -> bool:
    """Lets the new file share the old file's blocks; False if the file system cannot. Raises OSError."""
    try:
        fcntl.ioctl(new, _FICLONE, old.fileno())
    except OSError as exc:
        if exc.errno in _NO_CLONE:
            return False
        raise
    return True


class CheckpointArchives:
    """Thread-safe, if no container has two checkpoints at once."""

    def __init__(self, clone: Callable[[IO[bytes], IO[bytes]], bool] = share_blocks) -> None:
        self._clone = clone

    def begin(self, location: str, container: ContainerId) -> str:
        _require_location(location)
        directory = _directory(location, container)
        with _archive_errors(location):
            _remove(directory)
            directory.mkdir(mode=0o700)
        return str(directory)

    def copy(self, source: str, target: str, check: Callable[[], None]) -> None:
        with (
            _archive_errors(target),
            open(source, "rb") as old,
            open(target, "xb", opener=private) as new,
        ):
            if self._clone(old, new):
                return
            while piece := old.read(_PIECE):
                check()
                new.write(piece)

    def finish(self, location: str, container: ContainerId, manifest: bytes, check: Callable[[], None]) -> None:
        directory = _directory(location, container)
        archive = directory / _ARCHIVE
        with _archive_errors(location):
            names = sorted(name for name in os.listdir(directory) if name != _ARCHIVE)
            with (
                open(archive, "xb", opener=private) as file,
                tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar,
            ):
                tar.addfile(_member(MANIFEST, len(manifest)), io.BytesIO(manifest))
                for name in names:
                    with open(directory / name, "rb") as content:
                        size = os.fstat(content.fileno()).st_size
                        tar.addfile(_member(name, size), _Checked(content, check))
                tar.close()
                file.flush()
                os.fsync(file.fileno())
            check()
            os.rename(archive, location)
            sync(os.path.dirname(location))

    def discard(self, location: str, container: ContainerId) -> None:
        with _archive_errors(location):
            _remove(_directory(location, container))


class _Checked(io.RawIOBase):
    """Calls `check` before each read by tarfile."""

    def __init__(self, content: IO[bytes], check: Callable[[], None]) -> None:
        self._content = content
        self._check = check

    def read(self, size: int = -1) -> bytes:
        self._check()
        return self._content.read(size)


def _directory(location: str, container: ContainerId) -> Path:
    return Path(os.path.dirname(location), f".virtshim-checkpoint-{container.short}")


def _require_location(location: str) -> None:
    """Raises InvalidRequest."""
    if not os.path.isabs(location) or "\0" in location or location.endswith("/"):
        raise InvalidRequest(f"location must be the absolute path of a file: {location[:200]!r}")
    if not os.path.isdir(os.path.dirname(location)):
        raise InvalidRequest(f"location: there is no directory {os.path.dirname(location)[:200]!r}; create it first")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(location).st_mode):
            raise InvalidRequest(f"location: {location[:200]!r} exists and is not a file; choose another name")


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o600
    return member


def _remove(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)


@contextlib.contextmanager
def _archive_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in OUT_OF_SPACE:
            raise ResourceExhausted(f"there is no space for a checkpoint in {os.path.dirname(path)}") from exc
        if exc.errno == errno.ENAMETOOLONG:
            raise InvalidRequest(f"location: the name is too long: {path[:200]!r}") from exc
        raise InternalError(f"the checkpoint cannot be written: {path}: {exc.strerror}") from exc
