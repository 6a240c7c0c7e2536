"""Whether files can be opened past the page cache: asked before a VM is defined, whose start would fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from virtshim.domain.errors import InvalidRequest
from virtshim.domain.hardware.annotations import CACHE
from virtshim.domain.hardware.options import Cache
from virtshim.domain.vm import Disk


def refuse_without(cache: Cache, disks: Sequence[Disk]) -> None:
    """InvalidRequest for the first disk whose file system has no O_DIRECT."""
    if not cache.is_direct:
        return
    for path in (
        path for disk in disks if not disk.is_device for path in (disk.path, disk.backing and disk.backing.path)
    ):
        if path and not _opens(path):
            raise InvalidRequest(
                f"annotation {CACHE}: {cache.value} needs O_DIRECT, which the file system of {os.path.dirname(path)} does not "
                "have; write writeback or writethrough, or remove the annotation"
            )


def _opens(path: str) -> bool:
    """True also where something else is wrong: that is told elsewhere."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as exc:
        return exc.errno != errno.EINVAL
    return True
