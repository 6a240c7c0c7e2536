"""Empty disks of containers: files beside the root disk. Implements `virtshim.ports.disks.EmptyDiskFiles`."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from virtshim.domain.errors import InternalError, ResourceExhausted
from virtshim.domain.ids import ContainerId
from virtshim.domain.layout import Layout, empty_disk_name
from virtshim.domain.vm import Disk
from virtshim.domain.volumes.empty_disks import EmptyDisk
from virtshim.process import run

# Seconds. It writes some KiB.
_TIMEOUT: Final = 30.0


class EmptyDiskStore:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def create(self, container: ContainerId, wanted: EmptyDisk) -> Disk:
        path = Path(self._layout.container_dir(container), empty_disk_name(wanted.name))
        what = f"container {container}: disk {wanted.name}"
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            raise InternalError(f"{what} cannot be made anew: {exc.strerror}") from exc
        argv = ["qemu-img", "create", "-q", "-f", wanted.format.value, str(path), str(wanted.size_bytes)]
        done = run(argv, timeout=_TIMEOUT)
        if done.returncode != 0:
            path.unlink(missing_ok=True)
            if os.strerror(errno.ENOSPC) in done.summary():
                raise ResourceExhausted(f"{what}: no space for it in {path.parent}")
            raise InternalError(f"{what} cannot be made: {done.summary()}")
        return Disk(path=str(path), format=wanted.format, serial=wanted.name)
