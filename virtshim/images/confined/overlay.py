"""Which entries of an image's layers are there when all of them lie upon each other, at one place of its file system. Pure.

Layers are visited from the top down, so that what is wanted can be written as soon as it is met: what an upper layer replaced or
whited out is known by then. https://github.com/opencontainers/image-spec/blob/main/layer.md
"""

from __future__ import annotations

import posixpath

from virtshim.domain.errors import InvalidRequest
from virtshim.images.confined.layer_tar import EntryKind, TarEntry

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
# Nobody packs more there; hostile layers shall not fill our memory.
_MAX_NOTES = 1000


class Overlay:
    """Call `shows` for every entry of a layer, `layer_done` after it; from the top layer down."""

    def __init__(self, image: str, place: str, *, is_deep: bool = True, wanted: str = "the disk") -> None:
        """`place`: without a slash at its beginning; `is_deep`: what lies in directories below it counts, too; `wanted`: all that
        should be there, for error texts."""
        self._image = image
        self._place = place
        self._is_deep = is_deep
        self._wanted = wanted
        # Whose removal or replacement hides the place: itself, and what is above it. "" is the root.
        self._above = {place[:at] for at, char in enumerate(place) if char == "/"} | {""}
        self._hidden: set[str] = set()
        self._hidden_below: set[str] = set()
        self._directories: set[str] = set()
        self._next_hidden: set[str] = set()
        self._next_hidden_below: set[str] = set()

    def shows(self, entry: TarEntry) -> str:
        """The path, without a slash at its beginning, of what is there, is no directory, and lies at the place or below it; ""
        for everything else."""
        path = posixpath.normpath(f"/{entry.name}").lstrip("/")
        if not self._is_relevant(path):
            return ""
        parent, name = posixpath.split(path)
        if name == _OPAQUE:
            self._add(self._next_hidden_below, parent)
            return ""
        if name.startswith(_WHITEOUT):
            self._add(self._next_hidden, posixpath.join(parent, name.removeprefix(_WHITEOUT)))
            return ""
        if self._is_hidden(path):
            return ""
        if entry.kind is EntryKind.DIRECTORY:
            self._add(self._directories, path)
            return ""
        if path in self._directories:
            # An upper layer made a directory of what was none: it shows nothing of layers further down.
            self._add(self._next_hidden_below, path)
            return ""
        self._add(self._next_hidden, path)
        return "" if path in self._above else path

    def layer_done(self) -> None:
        """What this layer hides is hidden from the layers below it."""
        self._hidden |= self._next_hidden
        self._hidden_below |= self._next_hidden_below
        self._next_hidden.clear()
        self._next_hidden_below.clear()

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
                f"image {self._image!r} has more than {_MAX_NOTES} entries below /{self._place}; keep only {self._wanted}"
            )

    def _is_relevant(self, path: str) -> bool:
        """The place, what is below or above it, or a whiteout that hides it."""
        if path == self._place or (path and path in self._above):
            return True
        if path.startswith(f"{self._place}/"):
            return self._is_deep or "/" not in path[len(self._place) + 1 :]
        parent, name = posixpath.split(path)
        if name == _OPAQUE:
            return parent in self._above
        if name.startswith(_WHITEOUT):
            hidden = posixpath.join(parent, name.removeprefix(_WHITEOUT))
            return hidden == self._place or hidden in self._above
        return False
