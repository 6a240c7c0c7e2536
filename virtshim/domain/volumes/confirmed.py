"""Which copied volumes a container's guest has said it has. Pure."""

from __future__ import annotations

import dataclasses

from virtshim.domain.container import Container
from virtshim.domain.volumes.copies import CopiedVolume


def known_copies(container: Container) -> tuple[CopiedVolume, ...]:
    return tuple(volume for volume in container.spec.copies if volume.guest in container.status.copied)


def with_copied(container: Container, paths: tuple[str, ...]) -> Container:
    return dataclasses.replace(container, status=dataclasses.replace(container.status, copied=paths))
