"""What the database says of images, once more beside their disks: implements `virtshim.ports.images.ImageNotes`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import structlog

from virtshim.domain.errors import ShimError
from virtshim.domain.ids import ImageId
from virtshim.domain.image import Image
from virtshim.files import replace_text
from virtshim.store.rows import image_document, image_from

log = structlog.get_logger(__name__)

# Of one image; more is none of ours.
_MOST = 4 << 20


class ImageNoteFiles:
    """A file an image, of root's alone. They are trusted as the database is, which lies as open to whoever could change them."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def keep(self, image: Image) -> None:
        """See the port."""
        path, text = self._path(image.id), image_document(image)
        try:
            if self._read(path) != text:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_text(str(path), text)
        except OSError as exc:
            log.warning("image.note.not_kept", id=str(image.id), error=str(exc.strerror))

    def forget(self, image: ImageId) -> None:
        """See the port."""
        try:
            self._path(image).unlink(missing_ok=True)
        except OSError as exc:
            log.warning("image.note.not_forgotten", id=str(image), error=str(exc.strerror))

    def all(self) -> Sequence[Image]:
        """See the port."""
        found = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                image = image_from(self._read(path))
                if path == self._path(image.id):
                    found.append(image)
            except (OSError, ShimError) as exc:
                log.warning("image.note.unreadable", file=path.name, error=str(exc))
        return found

    def _path(self, image: ImageId) -> Path:
        return self._directory / f"{image.value.removeprefix('sha256:')}.json"

    def _read(self, path: Path) -> str:
        """Nothing if it is not there."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return ""
        with open(descriptor, "rb") as file:
            return file.read(_MOST).decode(errors="replace")
