"""Copies of records outside the database: of images (implements `virtshim.images.ports.ImageNotes`) and of containers
(implements `virtshim.store.ports.RecordCopies`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import structlog

from virtshim.model.errors import InternalError, ResourceExhausted, ShimError
from virtshim.model.ids import ContainerId, ImageId
from virtshim.model.image import Image
from virtshim.model.layout import Layout, record_copy
from virtshim.store import rows
from virtshim.system.files import OUT_OF_SPACE, private, replace_text

log = structlog.get_logger(__name__)

# virtshim never writes a longer note.
_MAX_NOTE_BYTES = 4 << 20


class ImageNoteFiles:
    """One file for each image. Only root can write these files, so they are trusted as the database is."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def keep(self, image: Image) -> None:
        path, text = self._path(image.id), rows.IMAGE.text(image)
        try:
            if self._read(path) != text:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_text(str(path), text)
        except OSError as exc:
            log.warning("image.note.not_kept", id=str(image.id), error=str(exc.strerror))

    def forget(self, image: ImageId) -> None:
        try:
            self._path(image).unlink(missing_ok=True)
        except OSError as exc:
            log.warning("image.note.not_forgotten", id=str(image), error=str(exc.strerror))

    def all(self) -> Sequence[Image]:
        found = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                image = rows.IMAGE.parse(self._read(path))
                if path == self._path(image.id):
                    found.append(image)
            except (OSError, ShimError) as exc:
                log.warning("image.note.unreadable", file=path.name, error=str(exc))
        return found

    def _path(self, image: ImageId) -> Path:
        return self._directory / f"{image.value.removeprefix('sha256:')}.json"

    def _read(self, path: Path) -> str:
        """ "" if there is no such file."""
        try:
            with open(path, "rb", opener=private) as file:
                return file.read(_MAX_NOTE_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return ""


class RecordCopyFiles:
    """Files with mode 0600 in directories that QEMU's user may search."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def keep(self, container: ContainerId, text: str) -> None:
        """Does not sync the file: a power cut also ends the VM, and without the VM the copy is useless."""
        path = record_copy(self._layout, container)
        try:
            with open(path, "w", encoding="ascii", opener=private) as file:
                file.write(text)
        except OSError as exc:
            kind = ResourceExhausted if exc.errno in OUT_OF_SPACE else InternalError
            raise kind(f"container {container}: the copy of its records cannot be written: {exc.strerror}") from exc

    def read(self, container: ContainerId) -> str:
        path = record_copy(self._layout, container)
        try:
            with open(path, encoding="ascii", errors="replace", opener=private) as file:
                return file.read()
        except FileNotFoundError:
            return ""
        except OSError as exc:
            raise InternalError(
                f"container {container}: the copy of its records cannot be read: {exc.strerror}"
            ) from exc
