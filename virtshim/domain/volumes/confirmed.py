"""Which volumes a container's guest has, as far as it has said so. Pure."""

from __future__ import annotations

import dataclasses

from virtshim.domain.container import Container
from virtshim.domain.volumes.copies import CopiedVolume
from virtshim.domain.volumes.memory_volumes import MemoryVolume
from virtshim.domain.volumes.shares import SharedVolume


def known_volumes(container: Container) -> tuple[SharedVolume | CopiedVolume | MemoryVolume, ...]:
    """Shared ones and those in its memory, unless it could not mount them, and copies that it has said it has."""
    spec, status = container.spec, container.status
    copied = tuple(volume for volume in spec.copies if volume.guest in status.copied)
    return copied if status.unmounted else (*spec.volumes, *spec.memory_volumes, *copied)


def with_told(container: Container, copied: tuple[str, ...], *, unmounted: bool, confirmed: bool) -> Container:
    """`confirmed`: the guest has just said that all is mounted; once said, that stays known."""
    confirmed |= container.status.mounts_confirmed
    status = dataclasses.replace(container.status, copied=copied, unmounted=unmounted, mounts_confirmed=confirmed)
    return dataclasses.replace(container, status=status)


def has_writable(container: Container) -> bool:
    """Whether what its guest writes may end up on the root disk if a mount fails unnoticed."""
    spec = container.spec
    writable = [not volume.readonly for volume in spec.volumes] + [
        not volume.readonly for volume in spec.memory_volumes
    ]
    return any(writable) or any(disk.guest for disk in spec.empty_disks)
