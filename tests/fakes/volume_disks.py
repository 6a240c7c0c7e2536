"""Volumes that become disks in the guest, scripted by a test."""

from __future__ import annotations

from virtshim.model.errors import NotFound


class FakeVolumeDisks:
    """Implements `virtshim.volumes.ports.VolumeDiskFiles`. `options`: a flexVolume's directory -> what its driver wrote.
    `images`: a volume's directory -> who the disk's image in it is."""

    def __init__(self) -> None:
        self.options: dict[str, bytes] = {}
        self.images: dict[str, str] = {}

    def image(self, directory: str, *, readonly: bool) -> str:
        if directory not in self.images:
            raise NotFound(f"{directory}/disk.img is not there: put a raw disk image there")
        return self.images[directory]

    def flex_options(self, directory: str) -> bytes:
        if directory not in self.options:
            raise NotFound(f"{directory}/virtlet-flexvolume.json is not there")
        return self.options[directory]
