"""Volumes that are disks in the guest, as they lie on the node."""

from __future__ import annotations

from typing import Protocol


class VolumeDiskFiles(Protocol):
    """No link in a volume is followed."""

    def flex_options(self, directory: str) -> bytes:
        """What the flexVolume driver has written into a volume's directory. Raises NotFound, InvalidRequest (no regular file, or
        too large), InternalError."""

    def image(self, directory: str, *, readonly: bool) -> str:
        """Who the disk's image in a volume is: the same for all names that the node has for it. Raises NotFound, InvalidRequest
        (no regular file, an empty one, or not to be written), InternalError."""
