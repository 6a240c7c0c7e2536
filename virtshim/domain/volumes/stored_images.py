"""What of the image store stays for a container. No I/O."""

from __future__ import annotations

from virtshim.domain.container import Container
from virtshim.domain.ids import ImageDigest


def stored_images(container: Container) -> tuple[ImageDigest, ...]:
    """As long as its record is there: the disk, and the files of its volumes."""
    return (container.image, *(volume.image.tree for volume in container.spec.volumes if volume.image is not None))
