"""What is on the CD-ROM for Windows' setup: the files of a volume, as kubelet has written them."""

from __future__ import annotations

from virtshim.domain.container import ContainerConfig
from virtshim.domain.volumes import sysprep
from virtshim.ports.copies import KubeletVolumes


def sysprep_files(written: KubeletVolumes, config: ContainerConfig, pod_uid: str, path: str) -> dict[str, bytes]:
    """Of the volume that is mounted at `path`; {} if none is. Raises ShimError."""
    volume = sysprep.volume(config.mounts, config.annotations, pod_uid, path)
    return {} if volume is None else sysprep.files(written.read(volume))
