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


def with_told(container: Container, copied: tuple[str, ...], *, unmounted: bool) -> Container:
    status = dataclasses.replace(container.status, copied=copied, unmounted=unmounted)
    return dataclasses.replace(container, status=status)
