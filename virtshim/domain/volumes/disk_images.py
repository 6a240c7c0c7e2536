"""Volumes that hold a disk's image, as KubeVirt's and CDI's with a file system do: which of a pod's its VM has as disks. Pure.

The pod says it, by the paths of its mounts: a directory that happens to hold a file of that name is shared as any other.
"""

from __future__ import annotations

import posixpath
from typing import Final

from virtshim.domain.devices.guest_view import MAX_BLOCK_DEVICES
from virtshim.domain.errors import InvalidRequest
from virtshim.domain.printable import escaped

ANNOTATION: Final = "virtshim.io/disk-images"
FILE: Final = "disk.img"


def parse(text: str) -> tuple[str, ...]:
    """Of one mount path a line, in their normal form. Raises InvalidRequest."""
    paths = tuple(_path(line.strip()) for line in text.splitlines() if line.strip())
    twice = next((path for path in paths if paths.count(path) > 1), "")
    if twice:
        raise InvalidRequest(f"{escaped(twice, 80)} is there twice; remove one")
    if len(paths) > MAX_BLOCK_DEVICES:
        raise InvalidRequest(f"{len(paths)} volumes are too many; name {MAX_BLOCK_DEVICES} at most")
    return paths


def _path(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/"):
        raise InvalidRequest(
            f"{escaped(text, 80)!r} is no absolute path without '..'; write a mountPath of the pod in each line"
        )
    path = "/" + posixpath.normpath(text).lstrip("/")
    if path == "/":
        raise InvalidRequest(
            "/ cannot be a disk's image; to boot from a volume use a PVC with volumeMode Block, and devicePath / in volumeDevices"
        )
    return path
