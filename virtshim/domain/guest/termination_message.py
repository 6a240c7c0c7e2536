"""A container's termination message: the file that kubelet shows in the pod's status. No I/O."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

PATH_ANNOTATION: Final = "io.kubernetes.container.terminationMessagePath"
# kubelet reads so many of its last bytes.
MAX_MESSAGE_BYTES: Final = 4096


class _Mount(Protocol):
    @property
    def container_path(self) -> str: ...

    @property
    def host_path(self) -> str: ...
    @property
    def readonly(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class TerminationFile:
    """`guest`: where the container's command writes it. `host`: kubelet's file, which is there before the container is."""

    guest: str
    host: str


def termination_file(annotations: Mapping[str, str], mounts: Iterable[_Mount]) -> TerminationFile | None:
    """kubelet names the path in an annotation, and mounts a file of its own there: after the pod's volumes, of which one may be
    at that path, too."""
    path = annotations.get(PATH_ANNOTATION, "")
    if not posixpath.isabs(path) or not path.isprintable():
        return None
    path = posixpath.normpath(path)
    there = [mount for mount in mounts if posixpath.normpath(mount.container_path) == path]
    if not there or there[-1].readonly:
        return None
    host = there[-1].host_path
    return TerminationFile(path, host) if posixpath.isabs(host) and "\0" not in host else None
