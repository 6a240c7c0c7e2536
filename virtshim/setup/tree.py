"""The node's file tree, below a root that tests and images choose: set-up changes files by it alone."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Final

from virtshim.devices.host_files import HostFiles
from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.system.files import sync

_MOST: Final = 8 << 20
# Of a file that is being written: nobody else's, and read by no program that reads all of a directory.
_UNFINISHED: Final = ".virtshim-setup"


class NoRegularFile(WrongState):
    """A link, a directory or the like is where a file would be written."""


class NodeTree:
    """Paths are the node's, absolute. What a link leads out of the root is refused."""

    def __init__(self, root: str = "/") -> None:
        self.root = os.path.realpath(root)

    def read(self, path: str) -> bytes | None:
        """None if it is not there. Raises NoRegularFile, WrongState."""
        place = self._place(path)
        if not os.path.lexists(place):
            return None
        if not stat.S_ISREG(os.lstat(place).st_mode):
            raise NoRegularFile(f"{path} is no regular file; move it away")
        with _telling(path, "read"), open(place, "rb") as file:
            content = file.read(_MOST + 1)
        if len(content) > _MOST:
            raise WrongState(f"{path} is longer than {_MOST} bytes; move it away")
        return content

    def status(self, path: str) -> os.stat_result:
        return os.lstat(self._place(path))

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(self._place(path))

    def write(self, path: str, content: bytes, mode: int = 0o644, owner: tuple[int, int] = (0, 0)) -> None:
        """The whole file, with its mode and owner, or nothing; on disk when it returns. Raises WrongState."""
        place = self._place(path)
        self.remove_unfinished(path)
        with _telling(path, "written"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(f"{place}{_UNFINISHED}", flags, 0o600)
            with open(descriptor, "wb") as file:
                file.write(content)
                if owner != (0, 0):
                    os.fchown(descriptor, *owner)
                os.fchmod(descriptor, mode)
                file.flush()
                os.fsync(descriptor)
            os.replace(f"{place}{_UNFINISHED}", place)
            sync(os.path.dirname(place))

    def remove(self, path: str) -> None:
        with _telling(path, "removed"), contextlib.suppress(FileNotFoundError):
            os.unlink(self._place(path))

    def remove_unfinished(self, path: str) -> None:
        """What a `write` that was killed left beside it."""
        with _telling(f"{path}{_UNFINISHED}", "removed"), contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._place(path)}{_UNFINISHED}")

    def make_directory(self, path: str, mode: int = 0o755) -> None:
        """Its parent is there."""
        with _telling(path, "made"), contextlib.suppress(FileExistsError):
            os.mkdir(self._place(path), mode)  # never more open than it is to be
            os.chmod(self._place(path), mode)

    def remove_directory(self, path: str) -> None:
        """If it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self._place(path))

    def _place(self, path: str) -> str:
        place = os.path.join(self.root, path.lstrip("/"))
        real = os.path.realpath(os.path.dirname(place))
        if self.root != "/" and not f"{real}/".startswith(f"{self.root}/"):
            raise WrongState(f"{path} leads out of {self.root}: a directory on its way is a link")
        return os.path.join(real, os.path.basename(place))


@contextlib.contextmanager
def _telling(path: str, done: str) -> Iterator[None]:
    """Of a read-only or full file system, a file that is made immutable ..."""
    try:
        yield
    except OSError as exc:
        raise WrongState(
            f"{path} cannot be {done}: {exc.strerror}; correct that, and run this again: it goes on where it ended"
        ) from exc


class FilesBefore(HostFiles):
    """The node as it was before set-up, so that set-up finds the same facts each time. `before`: by path of each file that is
    set-up's, what was there, None for nothing."""

    def __init__(self, root: str, before: Mapping[str, bytes | None]) -> None:
        super().__init__(root)
        self._before = before

    def exists(self, path: str) -> bool:
        return self._before[path] is not None if path in self._before else super().exists(path)

    def content(self, path: str, most: int) -> bytes:
        if path not in self._before:
            return super().content(path, most)
        if (found := self._before[path]) is None:
            raise InvalidRequest("cannot be read: No such file or directory")
        return found

    def text(self, path: str) -> str:
        if path not in self._before:
            return super().text(path)
        return (self._before[path] or b"").decode(errors="replace").strip()

    def names(self, path: str) -> list[str]:
        hidden = {name for name, content in self._before.items() if content is None}
        return [name for name in super().names(path) if f"{path.rstrip('/')}/{name}" not in hidden]
