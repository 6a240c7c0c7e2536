"""Volumes that are disks in the guest, as a test says that they are."""

from __future__ import annotations

from virtshim.domain.errors import NotFound


class FakeVolumeDisks:
    """Implements `virtshim.ports.volume_disks.VolumeDiskFiles`. `options`: a flexVolume's directory -> what its driver wrote."""

    def __init__(self) -> None:
        self.options: dict[str, bytes] = {}

    def flex_options(self, directory: str) -> bytes:
        if directory not in self.options:
            raise NotFound(f"{directory}/virtlet-flexvolume.json is not there")
        return self.options[directory]
