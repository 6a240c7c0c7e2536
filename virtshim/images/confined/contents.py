"""Finds the disk, the kernels and all files in an image's layers. Pure.

Layers are visited from the top down. An existing entry therefore comes from an upper layer and hides the same path in lower
layers, so nothing is ever overwritten. A hidden file may be the target of a visible hard link in its own layer: it is kept aside
until the layer ends. https://github.com/opencontainers/image-spec/blob/main/layer.md

`ImageTree` sends each file as an ENTRY frame: kind, path, mode, owner, group, time, and a word that depends on the kind:

    d  a directory, new, or sent before with default attributes
    f  a file: the number of data bytes that follow
    l  a symbolic link: its target
    h  a hard link: the path that it links to
    x  the disk, whose data is sent separately
    u  an earlier entry to remove: it was replaced, or is no longer needed aside

Paths begin with `root/`, or with `aside/` for files kept aside. Device nodes, FIFOs and sockets are left out.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator

from virtshim.images.confined import frames
from virtshim.images.confined.frames import (
    ASIDE,
    BOOT_PATH,
    BOOT_PLACE,
    DEFAULT_PLACE,
    MOST_BOOT_BYTES,
    MOST_BOOT_FILES,
    MOST_BOOT_TOTAL,
    MOST_DEPTH,
    MOST_ENTRIES,
    ROOT,
)
from virtshim.images.confined.layer_tar import EntryKind, TarEntry
from virtshim.model.errors import InvalidRequest

# Which entries are visible below one path when all layers are stacked. Because layers are visited from the top down, a
# visible entry can be written at once: every upper layer that could hide it has been read.

_WHITEOUT, _AUFS, _OPAQUE = ".wh.", ".wh..wh.", ".wh..wh..opq"
# Real images have fewer entries there. Hostile layers must not fill our memory.
_MAX_NOTES = 1000


class Overlay:
    """Call `shows` for every entry of a layer, then `layer_done`, from the top layer down."""

    def __init__(self, image: str, place: str, *, is_deep: bool = True, wanted: str = "the disk") -> None:
        """`place`: a path without a leading slash. `is_deep`: entries in subdirectories count too. `wanted`: what the place
        should contain, for error texts."""
        self._image = image
        self._place = place
        self._is_deep = is_deep
        self._wanted = wanted
        # The directories above the place; "" is the root. Removing or replacing one hides the place.
        self._above = {place[:at] for at, char in enumerate(place) if char == "/"} | {""}
        self._hidden: set[str] = set()
        self._hidden_below: set[str] = set()
        self._directories: set[str] = set()
        self._next_hidden: set[str] = set()
        self._next_hidden_below: set[str] = set()

    def shows(self, entry: TarEntry) -> str:
        """The entry's path, without a leading slash, if it is visible, not a directory, and at or below the place; otherwise
        ""."""
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
            # An upper layer replaced this file with a directory, which shows nothing of lower layers.
            self._add(self._next_hidden_below, path)
            return ""
        self._add(self._next_hidden, path)
        return "" if path in self._above else path

    def layer_done(self) -> None:
        """Applies what this layer hides to the layers below it."""
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
        """Whether the path is the place, above or below it, or a whiteout that hides it."""
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


# Finds the disk of a containerDisk, as KubeVirt packs it: exactly one file below /disk. The operator may configure another
# directory or the path of the file itself. Also finds kernels and their initrds in /boot.


class DiskSearch:
    """Searches one image. Call `is_disk` for every entry of a layer, then `layer_done`, from the top layer down."""

    def __init__(self, image: str, place: str) -> None:
        """`place`: a path without a leading slash; "" finds no disk."""
        self._image = image
        self._place = place
        self._overlay = Overlay(image, place)
        self._found = ""

    def is_disk(self, entry: TarEntry) -> bool:
        """True for the entry whose data is the disk. Raises InvalidRequest for a second disk, and for links."""
        path = self._overlay.shows(entry) if self._place else ""
        return path not in ("", DEFAULT_PLACE) and self._take(path, entry)

    def found_as(self, what: str) -> None:
        """Call it instead of `is_disk` if the whole layer is the disk."""
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
                f"build a containerDisk (FROM scratch, ADD disk.qcow2 /{self._place}/), or configure the disk's path "
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
    """Searches for files directly in /boot, as DiskSearch does for the disk. Links and files that are too large are left out: a
    pod that asks for one gets an error that lists the files there are. An image need not have any."""

    def __init__(self, image: str, place: str = BOOT_PLACE) -> None:
        """`place`: "" finds no files."""
        self._image = image
        self._place = place
        self._overlay = Overlay(image, place, is_deep=False, wanted="kernels")
        self._found: set[str] = set()
        self._bytes = 0

    @property
    def is_empty(self) -> bool:
        return not self._found

    def shown(self, entry: TarEntry) -> str:
        """The entry's path if it is visible in /boot, otherwise "". Call it for every entry."""
        path = self._overlay.shows(entry) if self._place else ""
        return f"/{path}" if path else ""

    def takes(self, path: str, entry: TarEntry) -> bool:
        """Whether the entry's data is to be kept. Raises InvalidRequest for two entries with one name."""
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


_MOST_NAME_CHARS = 48 << 20
_LONGEST_NAME, _LONGEST_PATH = 255, 4000

_IMPLICIT_MODE = 0o755
_KINDS = {EntryKind.FILE: "f", EntryKind.SYMLINK: "l"}
_GONE = TarEntry("", EntryKind.OTHER)
# The state of a path: a directory with an entry of its own, one known only from entries below it, or not a directory.
_EXPLICIT, _IMPLIED, _NO_DIRECTORY = 2, 1, 0


class _Unfit(Exception):
    """The image cannot be a volume; `str()` says why."""


class ImageTree:
    """All files of one image. Call `take` for every entry of a layer, then `layer_done`, from the top layer down; at the end
    `finish`."""

    def __init__(self, send: Callable[[bytes, bytes], None], most_entries: int = MOST_ENTRIES) -> None:
        """`send`: takes a frame's kind and payload."""
        self.refused = ""
        self.has_files = False
        self._send = send
        self._left, self._chars_left = most_entries, _MOST_NAME_CHARS
        self._depth_left = frames.DEPTH_ONCE
        self._made: dict[str, int] = {}
        self._root_sent = False
        self._hidden: set[str] = set()
        self._hidden_below: set[str] = set()
        self._next_hidden: set[str] = set()
        self._next_hidden_below: set[str] = set()
        # Paths of this layer, and the sent path that a hard link to each must name.
        self._sources: dict[str, str] = {}
        self._kept_aside = self._freed_aside = 0
        # Targets of hard links that have not been read yet, with the links to each.
        self._awaiting: dict[str, list[str]] = {}

    def take(self, entry: TarEntry, data: Iterator[bytes], *, is_disk: bool = False) -> None:
        if self.refused:
            return
        try:
            self._take(entry, data, is_disk=is_disk)
        except _Unfit as exc:
            self._refuse(str(exc))

    def layer_done(self) -> None:
        """Applies what this layer hides to the layers below it."""
        self._hidden |= self._next_hidden
        self._hidden_below |= self._next_hidden_below
        for one in (self._next_hidden, self._next_hidden_below, self._sources):
            one.clear()
        for number in range(self._freed_aside, self._kept_aside):  # their hard links stay
            self._send_entry("u", f"{ASIDE}/{number}", _GONE, "")
        self._freed_aside = self._kept_aside

    def finish(self) -> None:
        """Refuses the files if a hard link has no target."""
        if not self.refused and self._awaiting:
            self._refuse(f"it holds a hard link to {_shown(next(iter(self._awaiting)))}, which is not one of its files")

    def _refuse(self, why: str) -> None:
        self.refused = why
        self._freed_aside = self._kept_aside  # the reader removes all files
        for one in (self._made, self._hidden, self._hidden_below, self._awaiting):
            one.clear()
        self.layer_done()
        self._send(frames.NO_TREE, why.encode(errors="replace"))

    def _take(self, entry: TarEntry, data: Iterator[bytes], *, is_disk: bool) -> None:
        path = self._place(entry.name)
        parent, _, name = path.rpartition("/")
        if name == _OPAQUE:
            self._next_hidden_below.add(parent)
        elif path.startswith(_AUFS) or f"/{_AUFS}" in path:
            pass
        elif name.startswith(_WHITEOUT):
            self._white_out(parent, name.removeprefix(_WHITEOUT))
        elif entry.kind is EntryKind.DIRECTORY:
            self._directory(path, entry)
        elif not path:
            raise _Unfit("its root is not a directory")
        elif entry.kind is EntryKind.HARDLINK:
            self._link(path, entry)
        elif entry.kind is EntryKind.OTHER:
            self._next_hidden.add(path)
        else:
            self._file(path, entry, data, is_disk=is_disk)

    def _place(self, name: str) -> str:
        """The path without leading and trailing slashes; "" for the root."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        path = "/".join(parts)
        self._count(path)
        if ".." in parts:
            raise _Unfit(f"it holds the name {_shown(name)}, which contains '..'")
        if _length(path) > _LONGEST_PATH or any(_length(part) > _LONGEST_NAME for part in parts):
            raise _Unfit(f"it holds a name that is too long: {_shown(name)}")
        if len(parts) > MOST_DEPTH:
            raise _Unfit(f"it holds directories nested more than {MOST_DEPTH} deep: {_shown(name)}")
        return path

    def _count(self, path: str) -> None:
        self._left -= 1
        self._chars_left -= len(path)
        self._depth_left += frames.DEPTH_EACH - path.count("/")
        if self._left < 0 or self._chars_left < 0:
            raise _Unfit(
                f"it holds more than {MOST_ENTRIES} files, or names of more than {_MOST_NAME_CHARS} characters"
            )

        if self._depth_left < 0:
            raise _Unfit("it holds too many deeply nested directories")

    def _white_out(self, parent: str, name: str) -> None:
        if name in ("", ".", ".."):
            raise _Unfit(f"it holds a whiteout of {_shown(name)} in {_shown('/' + parent)}")
        self._next_hidden.add(f"{parent}/{name}" if parent else name)

    def _is_hidden(self, path: str) -> bool:
        while path:
            above = path.rpartition("/")[0]
            if path in self._hidden or above in self._hidden_below:
                return True
            path = above
        return False

    def _directory(self, path: str, entry: TarEntry) -> None:
        if not path:
            if not self._root_sent:
                self._root_sent = True
                self._send_visible("d", "", entry)
        elif not self._is_hidden(path) and self._made.get(path, _IMPLIED) == _IMPLIED:
            self._make_parents(path, entry)
            self._send_visible("d", path, entry)
            self._made[path] = _EXPLICIT

    def _make_parents(self, path: str, entry: TarEntry) -> None:
        if self._made.get(path.rpartition("/")[0], _NO_DIRECTORY) != _NO_DIRECTORY:
            return  # the parent exists, and so do all directories above it
        at = path.find("/")
        while at >= 0:
            above = path[:at]
            known = self._made.get(above)
            if known == _NO_DIRECTORY:
                raise _Unfit(f"it holds {_shown(path)} below {_shown(above)}, which is not a directory")
            if known is None:
                self._count(above)
                implied = TarEntry(above, EntryKind.DIRECTORY)
                implied.mode, implied.mtime = _IMPLICIT_MODE, entry.mtime
                self._send_visible("d", above, implied)
                self._made[above] = _IMPLIED
            at = path.find("/", at + 1)

    def _is_shown(self, path: str, entry: TarEntry) -> bool:
        """Whether a file or link is visible at `path`. If so, makes its parents and hides the path in lower layers."""
        if self._is_hidden(path):
            return False
        known = self._made.get(path)
        if known in (_EXPLICIT, _IMPLIED):
            # An upper layer, or this one, has a directory here, which shows nothing of lower layers.
            self._next_hidden_below.add(path)
            return False
        if known == _NO_DIRECTORY:
            # The layer has the path twice: the last entry counts.
            self._send_visible("u", path, entry)
        self._make_parents(path, entry)
        self._made[path] = _NO_DIRECTORY
        self._next_hidden.add(path)
        self.has_files = True
        return True

    def _file(self, path: str, entry: TarEntry, data: Iterator[bytes], *, is_disk: bool) -> None:
        names = [path] if self._is_shown(path, entry) else []
        names += self._links_to(path)
        if names:
            source = f"{ROOT}/{names[0]}"
        else:
            source = f"{ASIDE}/{self._kept_aside}"
            self._kept_aside += 1
        kind = "x" if is_disk else _KINDS[entry.kind]
        self._send_entry(kind, source, entry, str(entry.size) if kind == "f" else entry.target)
        if kind == "f":
            for piece in data:
                self._send(frames.PIECE, piece)
        self._sources[path] = source
        self._send_links(names[1:], source, entry)

    def _link(self, path: str, entry: TarEntry) -> None:
        target = self._place(entry.target)
        is_shown = self._is_shown(path, entry)
        source = self._sources.get(target)
        if source is None:
            if is_shown:  # a hidden link needs no target
                self._awaiting.setdefault(target, []).append(path)
            return
        self._sources[path] = source
        self._send_links(([path] if is_shown else []) + self._links_to(path), source, entry)

    def _links_to(self, path: str) -> list[str]:
        """Hard links to `path`, direct and indirect, that were read before it."""
        found: list[str] = []
        left = [path]
        while left:
            names = self._awaiting.pop(left.pop(), [])
            found += names
            left += names
        return found

    def _send_links(self, names: list[str], source: str, entry: TarEntry) -> None:
        for name in names:
            self._send_visible("h", name, entry, source)
            self._sources.setdefault(name, source)

    def _send_visible(self, kind: str, path: str, entry: TarEntry, more: str = "") -> None:
        self._send_entry(kind, f"{ROOT}/{path}" if path else ROOT, entry, more)

    def _send_entry(self, kind: str, path: str, entry: TarEntry, more: str) -> None:
        numbers = (entry.mode, entry.uid, entry.gid, entry.mtime)
        self._send(frames.ENTRY, frames.names(kind, path, *map(str, numbers), more))


def _length(name: str) -> int:
    """In bytes, as the kernel counts them."""
    return len(name.encode(errors="replace"))


def _shown(name: str) -> str:
    return ascii(name[:200])
