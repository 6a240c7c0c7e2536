"""What containers and pods take on the node."""

from __future__ import annotations

import time
from pathlib import Path

from virtshim.domain.image import FilesystemUsage
from virtshim.domain.layout import Layout
from virtshim.files import mountpoint, space_taken


class ContainersRoom:
    """Implements `virtshim.ports.disks.ContainersRoom`."""

    def __init__(self, layout: Layout) -> None:
        self._places = (Path(layout.containers), Path(layout.pod_disks))

    def use(self) -> FilesystemUsage:
        used, inodes = space_taken(path for place in self._places for path in (place, *place.rglob("*")))
        return FilesystemUsage(mountpoint(self._places[0]), used, inodes, time.time_ns())
