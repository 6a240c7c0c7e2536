"""The files of an image, put together from its layers, as a volume shows them. Pure.

Layers are visited from the top one down, as for the disk: what is there already was put there by a layer above, and hides what
comes. So nothing is ever written over. A file that is hidden may be what a visible one of its own layer is a hard link to: until
the layer's end it is kept aside. https://github.com/opencontainers/image-spec/blob/main/layer.md

What is said of each, as words: kind, path, mode, owner, group, time, and, by kind:

    d  a directory, new or told before without those
    f  a file; the bytes of data that follow
    l  a symbolic link; where it leads
    h  another name; the path of what it names
    x  the disk, whose data goes another way
    u  is not there after all; of what was kept aside, is not needed any more

Paths begin with `root/`, or with `aside/` for what is kept aside. Device nodes, FIFOs and sockets are left out.
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

# Which entries of an image's layers are there when all of them lie upon each other, at one place of its file system.
# Pure.
#
# Layers are visited from the top down, so that what is wanted can be written as soon as it is met: what an upper
# layer replaced or whited out is known by then. https://github.com/opencontainers/image-spec/blob/main/layer.md

_OVERLAY_WHITEOUT = ".wh."
_OVERLAY_OPAQUE = ".wh..wh..opq"
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
        if name == _OVERLAY_OPAQUE:
            self._add(self._next_hidden_below, parent)
            return ""
        if name.startswith(_OVERLAY_WHITEOUT):
            self._add(self._next_hidden, posixpath.join(parent, name.removeprefix(_OVERLAY_WHITEOUT)))
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
        if name == _OVERLAY_OPAQUE:
            return parent in self._above
        if name.startswith(_OVERLAY_WHITEOUT):
            hidden = posixpath.join(parent, name.removeprefix(_OVERLAY_WHITEOUT))
            return hidden == self._place or hidden in self._above
        return False


# Finds in an image's layers the one disk of a containerDisk, as KubeVirt packs them: exactly one file below /disk, or
# below another path that the operator says, which may be the file's own; and kernels with what they are started with,
# below /boot. Pure.


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


_MOST_NAME_CHARS = 48 << 20
_LONGEST_NAME, _LONGEST_PATH = 255, 4000

_IMAGE_TREE_WHITEOUT, _AUFS, _IMAGE_TREE_OPAQUE = ".wh.", ".wh..wh.", ".wh..wh..opq"
_IMPLICIT_MODE = 0o755
_KINDS = {EntryKind.FILE: "f", EntryKind.SYMLINK: "l"}
_GONE = TarEntry("", EntryKind.OTHER)
# What is known of a path: a directory that an entry told, one that only something below it did, or neither.
_TOLD, _IMPLIED, _NO_DIRECTORY = 2, 1, 0


class _Unfit(Exception):
    """`str()` says what is wrong with the files."""


class ImageTree:
    """One image's. Call `take` for every entry of a layer, `layer_done` after it; from the top layer down; at last `finish`."""

    def __init__(self, send: Callable[[bytes, bytes], None], most_entries: int = MOST_ENTRIES) -> None:
        """`send`: kind of frame and payload."""
        self.refused = ""
        self.has_files = False
        self._send = send
        self._left, self._chars_left = most_entries, _MOST_NAME_CHARS
        self._depth_left = frames.DEPTH_ONCE
        self._made: dict[str, int] = {}
        self._root_told = False
        self._hidden: set[str] = set()
        self._hidden_below: set[str] = set()
        self._next_hidden: set[str] = set()
        self._next_hidden_below: set[str] = set()
        # Of this layer: what hard links to these paths are made of.
        self._sources: dict[str, str] = {}
        self._kept_aside = self._freed_aside = 0
        # Names of what is further down, by its path there.
        self._awaiting: dict[str, list[str]] = {}

    def take(self, entry: TarEntry, data: Iterator[bytes], *, is_disk: bool = False) -> None:
        """Nothing any more when the files have been refused."""
        if self.refused:
            return
        try:
            self._take(entry, data, is_disk=is_disk)
        except _Unfit as exc:
            self._refuse(str(exc))

    def layer_done(self) -> None:
        """What this layer hides is hidden from the layers below it."""
        self._hidden |= self._next_hidden
        self._hidden_below |= self._next_hidden_below
        for one in (self._next_hidden, self._next_hidden_below, self._sources):
            one.clear()
        for number in range(self._freed_aside, self._kept_aside):  # their other names, if they have some, stay
            self._tell("u", f"{ASIDE}/{number}", _GONE, "")
        self._freed_aside = self._kept_aside

    def finish(self) -> None:
        if not self.refused and self._awaiting:
            self._refuse(f"it holds a hard link to {_shown(next(iter(self._awaiting)))}, which is no file in it")

    def _refuse(self, why: str) -> None:
        self.refused = why
        self._freed_aside = self._kept_aside  # it is gone with all others
        for one in (self._made, self._hidden, self._hidden_below, self._awaiting):
            one.clear()
        self.layer_done()
        self._send(frames.NO_TREE, why.encode(errors="replace"))

    def _take(self, entry: TarEntry, data: Iterator[bytes], *, is_disk: bool) -> None:
        path = self._place(entry.name)
        parent, _, name = path.rpartition("/")
        if name == _IMAGE_TREE_OPAQUE:
            self._next_hidden_below.add(parent)
        elif path.startswith(_AUFS) or f"/{_AUFS}" in path:
            pass
        elif name.startswith(_IMAGE_TREE_WHITEOUT):
            self._white_out(parent, name.removeprefix(_IMAGE_TREE_WHITEOUT))
        elif entry.kind is EntryKind.DIRECTORY:
            self._directory(path, entry)
        elif not path:
            raise _Unfit("its root is no directory")
        elif entry.kind is EntryKind.HARDLINK:
            self._link(path, entry)
        elif entry.kind is EntryKind.OTHER:
            self._next_hidden.add(path)
        else:
            self._file(path, entry, data, is_disk=is_disk)

    def _place(self, name: str) -> str:
        """The path without slashes at its ends, "" for the root."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        path = "/".join(parts)
        self._count(path)
        if ".." in parts:
            raise _Unfit(f"it holds the name {_shown(name)}, which leads up")
        if _length(path) > _LONGEST_PATH or any(_length(part) > _LONGEST_NAME for part in parts):
            raise _Unfit(f"it holds a name that is too long: {_shown(name)}")
        if len(parts) > MOST_DEPTH:
            raise _Unfit(f"it holds more than {MOST_DEPTH} directories one in the other: {_shown(name)}")
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
            raise _Unfit("it holds too many directories one in the other")

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
            if not self._root_told:
                self._root_told = True
                self._say("d", "", entry)
        elif not self._is_hidden(path) and self._made.get(path, _IMPLIED) == _IMPLIED:
            self._make_parents(path, entry)
            self._say("d", path, entry)
            self._made[path] = _TOLD

    def _make_parents(self, path: str, entry: TarEntry) -> None:
        if self._made.get(path.rpartition("/")[0], _NO_DIRECTORY) != _NO_DIRECTORY:
            return  # and so are all above it
        at = path.find("/")
        while at >= 0:
            above = path[:at]
            known = self._made.get(above)
            if known == _NO_DIRECTORY:
                raise _Unfit(f"it holds {_shown(path)} below {_shown(above)}, which is no directory")
            if known is None:
                self._count(above)
                implied = TarEntry(above, EntryKind.DIRECTORY)
                implied.mode, implied.mtime = _IMPLICIT_MODE, entry.mtime
                self._say("d", above, implied)
                self._made[above] = _IMPLIED
            at = path.find("/", at + 1)

    def _is_shown(self, path: str, entry: TarEntry) -> bool:
        """Whether what is no directory is seen there. If so, its place is free, and hides what is below."""
        if self._is_hidden(path):
            return False
        known = self._made.get(path)
        if known in (_TOLD, _IMPLIED):
            # A layer above, or this one, made a directory of it, which shows nothing of the layers further down.
            self._next_hidden_below.add(path)
            return False
        if known == _NO_DIRECTORY:
            # Twice in one layer: the last one counts.
            self._say("u", path, entry)
        self._make_parents(path, entry)
        self._made[path] = _NO_DIRECTORY
        self._next_hidden.add(path)
        self.has_files = True
        return True

    def _file(self, path: str, entry: TarEntry, data: Iterator[bytes], *, is_disk: bool) -> None:
        names = [path] if self._is_shown(path, entry) else []
        names += self._awaited(path)
        if names:
            source = f"{ROOT}/{names[0]}"
        else:
            source = f"{ASIDE}/{self._kept_aside}"
            self._kept_aside += 1
        kind = "x" if is_disk else _KINDS[entry.kind]
        self._tell(kind, source, entry, str(entry.size) if kind == "f" else entry.target)
        if kind == "f":
            for piece in data:
                self._send(frames.PIECE, piece)
        self._sources[path] = source
        self._name_too(names[1:], source, entry)

    def _link(self, path: str, entry: TarEntry) -> None:
        target = self._place(entry.target)
        is_shown = self._is_shown(path, entry)
        source = self._sources.get(target)
        if source is None:
            if is_shown:  # of what is hidden nobody asks for it
                self._awaiting.setdefault(target, []).append(path)
            return
        self._sources[path] = source
        self._name_too(([path] if is_shown else []) + self._awaited(path), source, entry)

    def _awaited(self, path: str) -> list[str]:
        """Names of it, and of these, that layers above, or this one, have told already."""
        found: list[str] = []
        left = [path]
        while left:
            names = self._awaiting.pop(left.pop(), [])
            found += names
            left += names
        return found

    def _name_too(self, names: list[str], source: str, entry: TarEntry) -> None:
        for name in names:
            self._say("h", name, entry, source)
            self._sources.setdefault(name, source)

    def _say(self, kind: str, path: str, entry: TarEntry, more: str = "") -> None:
        self._tell(kind, f"{ROOT}/{path}" if path else ROOT, entry, more)

    def _tell(self, kind: str, path: str, entry: TarEntry, more: str) -> None:
        numbers = (entry.mode, entry.uid, entry.gid, entry.mtime)
        self._send(frames.ENTRY, frames.names(kind, path, *map(str, numbers), more))


def _length(name: str) -> int:
    """In bytes, as the kernel counts them."""
    return len(name.encode(errors="replace"))


def _shown(name: str) -> str:
    return ascii(name[:200])
