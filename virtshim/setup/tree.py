"""The node's file tree, below a root that tests and image builds choose. Setup changes files only through this module."""

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
# Suffix of a file while it is written. Nobody else uses the name, and programs that read a whole directory ignore it.
_UNFINISHED: Final = ".virtshim-setup"


class NoRegularFile(WrongState):
    """The path is a link, a directory or another special file, where a regular file is expected."""


class NodeTree:
    """Paths are absolute paths of the node. A path that leaves the root through a link is refused."""

    def __init__(self, root: str = "/") -> None:
        self.root = os.path.realpath(root)

    def read(self, path: str) -> bytes | None:
        """The content; None if the file does not exist. Raises NoRegularFile, WrongState."""
        place = self._place(path)
        if not os.path.lexists(place):
            return None
        if not stat.S_ISREG(os.lstat(place).st_mode):
            raise NoRegularFile(f"{path} is not a regular file; move it away")
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
        """Writes the whole file with its mode and owner, or nothing. The file is on disk when this returns. Raises WrongState."""
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
        """Removes the temporary file that a killed `write` left."""
        with _telling(f"{path}{_UNFINISHED}", "removed"), contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._place(path)}{_UNFINISHED}")

    def make_directory(self, path: str, mode: int = 0o755) -> None:
        """The parent directory must exist."""
        with _telling(path, "made"), contextlib.suppress(FileExistsError):
            os.mkdir(self._place(path), mode)  # with the final mode, so the directory is never more open
            os.chmod(self._place(path), mode)

    def remove_directory(self, path: str) -> None:
        """Removes the directory if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self._place(path))

    def _place(self, path: str) -> str:
        place = os.path.join(self.root, path.lstrip("/"))
        real = os.path.realpath(os.path.dirname(place))
        if self.root != "/" and not f"{real}/".startswith(f"{self.root}/"):
            raise WrongState(f"{path} leads out of {self.root}, because a directory on the way is a link")
        return os.path.join(real, os.path.basename(place))


@contextlib.contextmanager
def _telling(path: str, done: str) -> Iterator[None]:
    """Turns OSError into WrongState: for a read-only or full file system, an immutable file and so on."""
    try:
        yield
    except OSError as exc:
        raise WrongState(
            f"{path} cannot be {done}: {exc.strerror}; correct that and run this command again, which continues where it stopped"
        ) from exc


class FilesBefore(HostFiles):
    """The node's files as they were before setup, so that setup finds the same facts each time. `before`: for each path that
    setup wrote, the former content, None for no file."""

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
