"""emptyDirs of `medium: Memory` that are a tmpfs in the guest's own memory: the annotation that asks for them. Pure.

Without the annotation such a volume is shared like any other. Its files then outlive the guest and stay for the pod's
life, as Kubernetes promises.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Final

from virtshim.model.errors import InvalidRequest
from virtshim.model.text import escaped

ANNOTATION: Final = "virtshim.io/memory-volumes"
_MOST: Final = 16


@dataclass(frozen=True, slots=True)
class Tmpfs:
    """The options with which kubelet mounted it on the node."""

    size_bytes: int
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class MemoryVolume:
    """`guest`: its normalized path in the guest. `host`: the directory on the node, which stays empty."""

    guest: str
    host: str
    tmpfs: Tmpfs
    readonly: bool = False

    @property
    def options(self) -> str:
        """Mount options for mount(8)."""
        made = self.tmpfs
        words = [f"size={made.size_bytes}", f"mode={made.mode:o}", f"uid={made.uid}", f"gid={made.gid}", "nosuid,nodev"]
        return ",".join([*words, "ro"] if self.readonly else words)


def parse(text: str) -> tuple[str, ...]:
    """The mount paths, one a line, in their normal form. Raises InvalidRequest."""
    paths = tuple(_path(line.strip()) for line in text.splitlines() if line.strip())
    twice = next((path for path in paths if paths.count(path) > 1), "")
    if twice:
        raise InvalidRequest(f"{escaped(twice, 80)} is listed twice; remove one")
    if len(paths) > _MOST:
        raise InvalidRequest(f"{len(paths)} volumes are too many; name {_MOST} at most")
    return paths


def _path(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/"):
        raise InvalidRequest(
            f"{escaped(text, 80)!r} is not an absolute path without '..'; write a mountPath of the pod in each line"
        )
    return "/" + posixpath.normpath(text).lstrip("/")
