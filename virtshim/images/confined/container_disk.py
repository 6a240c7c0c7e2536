"""Finds in an image's layers the one disk of a containerDisk, as KubeVirt packs them: exactly one file below /disk, or below
another path that the operator says, which may be the file's own; and kernels with what they are started with, below /boot. Pure.
"""

from __future__ import annotations

from virtshim.domain.errors import InvalidRequest
from virtshim.images.confined.frames import (
    BOOT_PATH,
    BOOT_PLACE,
    DEFAULT_PLACE,
    MOST_BOOT_BYTES,
    MOST_BOOT_FILES,
    MOST_BOOT_TOTAL,
)
from virtshim.images.confined.layer_tar import EntryKind, TarEntry
from virtshim.images.confined.overlay import Overlay


class DiskSearch:
    """One image's search. Call `is_disk` for every entry of a layer, `layer_done` after it; from the top layer down."""

    def __init__(self, image: str, place: str) -> None:
        """`place`: without a slash at its beginning; "" finds none."""
        self._image = image
        self._place = place
        self._overlay = Overlay(image, place)
        self._found = ""

    def is_disk(self, entry: TarEntry) -> bool:
        """True for the entry whose data is the disk. Raises InvalidRequest for a second one, and for links."""
        path = self._overlay.shows(entry) if self._place else ""
        return path not in ("", DEFAULT_PLACE) and self._take(path, entry)

    def found_as(self, what: str) -> None:
        """A layer is the disk itself."""
        self._found = what

    def layer_done(self) -> None:
        self._overlay.layer_done()

    def finish(self) -> None:
        """Raises InvalidRequest if there was no disk."""
        if not self._found and not self._place:
            raise InvalidRequest(f"image {self._image!r} is an artifact without a disk")
        if not self._found:
            raise InvalidRequest(
                f"image {self._image!r} is not a VM image: it has no file below /{self._place}; "
                f"build a containerDisk (FROM scratch, ADD disk.qcow2 /{self._place}/), or say where its disk is "
                "(images.disk_paths)"
            )

    def _take(self, path: str, entry: TarEntry) -> bool:
        if entry.kind is not EntryKind.FILE:
            raise InvalidRequest(
                f"image {self._image!r}: /{path[:200]} is a link or a device; the disk must be a plain file"
            )
        if self._found:
            raise InvalidRequest(
                f"image {self._image!r} has two files below /{self._place} ({self._found[:200]!r}, {path[:200]!r}); keep one"
            )
        self._found = path
        return True


class BootSearch:
    """As DiskSearch, for what lies directly in /boot. Links and files that are too large are none of it: a pod that asks for one
    hears what there is. An image need not have any."""

    def __init__(self, image: str, place: str = BOOT_PLACE) -> None:
        """`place`: "" finds none."""
        self._image = image
        self._place = place
        self._overlay = Overlay(image, place, is_deep=False, wanted="kernels")
        self._found: set[str] = set()
        self._bytes = 0

    @property
    def is_empty(self) -> bool:
        return not self._found

    def shown(self, entry: TarEntry) -> str:
        """For every entry, whether it is taken or not: its path, or ""."""
        path = self._overlay.shows(entry) if self._place else ""
        return f"/{path}" if path else ""

    def takes(self, path: str, entry: TarEntry) -> bool:
        """Whether its data is wanted. Raises InvalidRequest for two of one name."""
        if entry.kind is not EntryKind.FILE or not BOOT_PATH.fullmatch(path):
            return False
        if path in self._found:
            raise InvalidRequest(f"image {self._image!r} has {path} twice in one layer; build it again")
        is_taken = 0 < entry.size <= MOST_BOOT_BYTES and len(self._found) < MOST_BOOT_FILES
        if not is_taken or self._bytes + entry.size > MOST_BOOT_TOTAL:
            return False
        self._found.add(path)
        self._bytes += entry.size
        return True

    def layer_done(self) -> None:
        self._overlay.layer_done()
