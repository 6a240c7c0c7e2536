"""Volumes of a pod that its VM has as disks of its own."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from virtshim.domain.container import ContainerConfig
from virtshim.domain.volumes import flex_volumes
from virtshim.domain.volumes.empty_disks import EmptyDisk
from virtshim.domain.volumes.pod_mounts import flex_mounts
from virtshim.ports.volume_disks import VolumeDiskFiles


@dataclass(frozen=True, slots=True)
class VolumeDisks:
    files: VolumeDiskFiles

    def empty(self, config: ContainerConfig, pod_uid: str) -> Sequence[EmptyDisk]:
        """Of Virtlet's flexVolumes. Raises ShimError for one that is not to be had."""
        return [
            flex_volumes.parse(self.files.flex_options(host), posixpath.basename(host), guest)
            for guest, host in flex_mounts(config.mounts, config.annotations, pod_uid)
        ]
