"""The host's sysfs, procfs and /dev for device code, below a root that tests choose. Read-only."""

from __future__ import annotations

import enum
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virtshim.model.errors import InvalidRequest, Unavailable
from virtshim.system.files import without_waiting

_MAX_TEXT: Final = 1 << 20


class NodeKind(enum.Enum):
    MISSING = "missing"
    BLOCK = "block device"
    CHARACTER = "character device"
    DIRECTORY = "directory"
    OTHER = "file"


@dataclass(frozen=True, slots=True)
class NodeStat:
    """The result of stat(2), links followed. `major`, `minor`: of devices."""

    kind: NodeKind
    major: int = 0
    minor: int = 0


_KINDS: Final = {
    stat.S_IFBLK: NodeKind.BLOCK,
    stat.S_IFCHR: NodeKind.CHARACTER,
    stat.S_IFDIR: NodeKind.DIRECTORY,
}


def node_stat(path: str) -> NodeStat:
    """MISSING also for a path that cannot be reached."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return NodeStat(NodeKind.MISSING)
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), NodeKind.OTHER)
    return NodeStat(kind, os.major(found.st_rdev), os.minor(found.st_rdev))


def _require_absent(path: str, exc: Exception) -> None:
    """Raises Unavailable if the read failed for lack of resources. Any other failure counts as absent, because a driver
    may refuse to be read."""
    if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise Unavailable(f"{path} cannot be read now: {exc.strerror}") from exc


class HostFiles:
    """Paths are absolute host paths. Missing files read as empty. A read that fails for lack of descriptors or memory
    raises Unavailable, because a device must not look as if it had no neighbours."""

    def __init__(self, root: str = "/", node: Callable[[str], NodeStat] = node_stat) -> None:
        self._root = os.path.realpath(root)
        self._node = node

    def node(self, path: str) -> NodeStat:
        return self._node(self._below(path))

    def text(self, path: str) -> str:
        """The content without surrounding white space."""
        try:
            with open(self._below(path), encoding="utf-8", errors="replace") as file:
                return file.read(_MAX_TEXT).strip()
        except (OSError, ValueError) as exc:
            _require_absent(path, exc)
        return ""

    def head(self, path: str, size: int) -> bytes:
        """The first `size` bytes of the file, or all of a shorter file."""
        try:
            with open(self._below(path), "rb", buffering=0) as file:
                return file.read(size)
        except (OSError, ValueError) as exc:
            _require_absent(path, exc)
        return b""

    def content(self, path: str, most: int) -> bytes:
        """The content of a regular file. Raises InvalidRequest if it cannot be read, or is longer than `most` bytes."""
        try:
            with open(self._below(path), "rb", opener=without_waiting) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise InvalidRequest("not a regular file")
                data = file.read(most + 1)
        except OSError as exc:
            raise InvalidRequest(f"cannot be read: {exc.strerror}") from exc
        if len(data) > most:
            raise InvalidRequest(f"longer than {most} bytes")
        return data

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted."""
        try:
            return sorted(os.listdir(self._below(path)))
        except (OSError, ValueError) as exc:
            _require_absent(path, exc)
        return []

    def exists(self, path: str) -> bool:
        return os.path.exists(self._below(path))

    def target(self, path: str) -> str:
        """The host path that `path` leads to, all links followed; "" if it does not exist."""
        real = os.path.realpath(self._below(path))
        if not os.path.exists(real):
            return ""
        return "/" + os.path.relpath(real, self._root) if self._root != "/" else real

    def _below(self, path: str) -> str:
        return str(Path(self._root, path.lstrip("/")))
