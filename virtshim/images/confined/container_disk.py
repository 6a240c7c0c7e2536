"""Finds the one disk of a containerDisk in its layers, as KubeVirt packs them: exactly one file below /disk, or below another
path that the operator says, which may be the file's own. Pure.

Layers are visited from the top down, so that the disk can be written as soon as it is met: what an upper layer replaced or
whited out is known by then. https://github.com/opencontainers/image-spec/blob/main/layer.md
"""

from __future__ import annotations

import posixpath

from virtshim.domain.errors import InvalidRequest
from virtshim.images.confined.frames import DEFAULT_PLACE
from virtshim.images.confined.layer_tar import EntryKind, TarEntry

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
# Nobody packs more there; hostile layers shall not fill our memory.
_MAX_NOTES = 1000


class DiskSearch:
    """One image's search. Call `is_disk` for every entry of a layer, `layer_done` after it; from the top layer down."""

    def __init__(self, image: str, place: str) -> None:
        """`place`: without a slash at its beginning."""
        self._image = image
        self._place = place
        # Whose removal or replacement hides the place: itself, and what is above it. "" is the root.
        self._above = {place[:at] for at, char in enumerate(place) if char == "/"} | {""}
        self._found = ""
        self._hidden: set[str] = set()
        self._hidden_below: set[str] = set()
        self._directories: set[str] = set()
        self._next_hidden: set[str] = set()
        self._next_hidden_below: set[str] = set()

    def is_disk(self, entry: TarEntry) -> bool:
        """True for the entry whose data is the disk. Raises InvalidRequest for a second one, and for links."""
        path = posixpath.normpath(f"/{entry.name}").lstrip("/")
        if not self._is_relevant(path):
            return False
        parent, name = posixpath.split(path)
        if name == _OPAQUE:
            self._add(self._next_hidden_below, parent)
            return False
        if name.startswith(_WHITEOUT):
            self._add(self._next_hidden, posixpath.join(parent, name.removeprefix(_WHITEOUT)))
            return False
        if self._is_hidden(path):
            return False
        if entry.kind is EntryKind.DIRECTORY:
            self._add(self._directories, path)
            return False
        if path in self._directories:
            # An upper layer made a directory of what was none: it shows nothing of layers further down.
            self._add(self._next_hidden_below, path)
            return False
        self._add(self._next_hidden, path)
        return path != DEFAULT_PLACE and path not in self._above and self._take(path, entry)

    def found_as(self, what: str) -> None:
        """A layer is the disk itself."""
        self._found = what

    def layer_done(self) -> None:
        """What this layer hides is hidden from the layers below it."""
        self._hidden |= self._next_hidden
        self._hidden_below |= self._next_hidden_below
        self._next_hidden.clear()
        self._next_hidden_below.clear()

    def finish(self) -> None:
        """Raises InvalidRequest if there was no disk."""
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

    def _is_hidden(self, path: str) -> bool:
        above = "" if path == "" else posixpath.dirname(path)
        while True:
            if path in self._hidden or above in self._hidden_below:
                return True
            if not above:
                return False
            path, above = above, posixpath.dirname(above)

    def _add(self, notes: set[str], path: str) -> None:
        notes.add(path)
        if len(notes) > _MAX_NOTES:
            raise InvalidRequest(
                f"image {self._image!r} has more than {_MAX_NOTES} entries below /{self._place}; keep only the disk"
            )

    def _is_relevant(self, path: str) -> bool:
        """The place, what is below or above it, or a whiteout that hides it."""
        if path == self._place or path.startswith(f"{self._place}/") or (path and path in self._above):
            return True
        parent, name = posixpath.split(path)
        if name == _OPAQUE:
            return parent in self._above
        if name.startswith(_WHITEOUT):
            hidden = posixpath.join(parent, name.removeprefix(_WHITEOUT))
            return hidden == self._place or hidden in self._above
        return False
