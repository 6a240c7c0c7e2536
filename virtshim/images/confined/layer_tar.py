"""Reads a layer's tar stream in one pass and in bounded memory. Pure: bytes in, entries out.

Layers are hostile input, so the standard library's tarfile is not used: it reads extended headers of any size into memory,
follows endless sparse maps, and on some supported Python versions loops forever on a negative size (CVE-2025-8194). This reader
takes the formats that image builders write (ustar, pax and GNU) and refuses sparse entries.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

_BLOCK = 512
_MAX_EXTENDED = 1 << 20
_NO_DATA = frozenset(b"123456")
_EXTENDED = frozenset(b"xgLK")
# GNU's extra headers for names that are too long, and the pax keys of the same meaning.
_LONG = {ord("L"): "path", ord("K"): "linkpath"}
_READ = frozenset(("path", "linkpath", "uid", "gid", "mtime"))
# Some builders write the file type into the mode.
_MOST_MODE = 0o177777
_MOST_ID = (1 << 32) - 2
_LATEST = (1 << 33) - 1


class EntryKind(enum.Enum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symbolic link"
    HARDLINK = "hard link"
    OTHER = "other"


_KINDS = {
    ord("0"): EntryKind.FILE,
    0: EntryKind.FILE,
    ord("7"): EntryKind.FILE,
    ord("5"): EntryKind.DIRECTORY,
    ord("2"): EntryKind.SYMLINK,
    ord("1"): EntryKind.HARDLINK,
}


class BadTar(Exception):
    """The archive is damaged, cut short, unsupported, or not a tar; `str()` says which."""


class TarEntry:
    """`name`: as written. `size`: bytes of data that follow. `target`: of a link. `mtime`: in seconds. An invalid mode, owner or
    time is 0."""

    __slots__ = ("gid", "kind", "mode", "mtime", "name", "size", "target", "uid")

    def __init__(self, name: str, kind: EntryKind, size: int = 0, target: str = "") -> None:
        self.name = name
        self.kind = kind
        self.size = size
        self.target = target
        self.mode = self.uid = self.gid = self.mtime = 0


class TarStream:
    """`chunks` are the archive's bytes, split anywhere. They are read to the end, padding included."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer = b""
        self._at = 0
        self._left = 0
        self._padding = 0

    def next(self) -> TarEntry | None:
        """The next entry; None at the archive's end. Skips unread data of the entry before. Raises BadTar."""
        for _ in self.data():
            pass
        extended: dict[str, str] = {}
        while True:
            header = self._header()
            if header is None:
                for _ in self._chunks:
                    pass
                return None
            kind = header[156]
            announced = _number(header[124:136])
            if kind == ord("S"):
                raise BadTar("it holds a sparse entry, which is not supported")
            if kind not in _EXTENDED:
                break
            extension = self._extension(announced)
            if kind in _LONG:
                extended[_LONG[kind]] = _text(extension)
            elif kind == ord("x"):
                _read_pax(extension, extended)
        written = extended.get("path")
        written = _name(header) if written is None else written
        self._begin(0 if kind in _NO_DATA else int(extended.get("size", announced)))
        entry_kind = _KINDS.get(kind, EntryKind.OTHER)
        if entry_kind is EntryKind.FILE and written.endswith("/"):
            entry_kind = EntryKind.DIRECTORY
        entry = TarEntry(written, entry_kind, self._left, extended.get("linkpath", "") or _text(header[157:257]))
        entry.mode = _attribute(header[100:108], "", _MOST_MODE) & 0o7777
        entry.uid = _attribute(header[108:116], extended.get("uid", ""), _MOST_ID)
        entry.gid = _attribute(header[116:124], extended.get("gid", ""), _MOST_ID)
        entry.mtime = _attribute(header[136:148], extended.get("mtime", ""), _LATEST)
        return entry

    def data(self) -> Iterator[bytes]:
        """The unread data of the current entry. Raises BadTar if the archive ends before it does."""
        while self._left:
            piece = self._some(self._left)
            self._left -= len(piece)
            yield piece
        while self._padding:
            self._padding -= len(self._some(self._padding))

    def _begin(self, size: int) -> None:
        self._left = size
        self._padding = -size % _BLOCK

    def _extension(self, size: int) -> bytes:
        if size > _MAX_EXTENDED:
            raise BadTar("it holds a header extension of more than 1 MiB")
        self._begin(size)
        return b"".join(self.data())

    def _header(self) -> bytes | None:
        """The next header block; None at the end, which is a block of zeros or the end of the bytes."""
        block = self._exactly(_BLOCK)
        if not block or not any(block):
            return None
        unsigned = sum(block) - sum(block[148:156]) + 8 * ord(" ")
        if _number(block[148:156]) != unsigned:
            raise BadTar("it is damaged or not a tar archive")
        return block

    def _exactly(self, size: int) -> bytes:
        """Exactly `size` bytes, or none if the stream has ended."""
        parts = bytearray()
        while len(parts) < size:
            piece = self._some(size - len(parts), end_allowed=not parts)
            if not piece:
                return b""
            parts += piece
        return bytes(parts)

    def _some(self, limit: int, *, end_allowed: bool = False) -> bytes:
        while self._at >= len(self._buffer):
            chunk = next(self._chunks, None)
            if chunk is None:
                if end_allowed:
                    return b""
                raise BadTar("it is cut short")
            self._buffer, self._at = chunk, 0
        piece = self._buffer[self._at : self._at + limit]
        self._at += len(piece)
        return piece


def _number(field: bytes) -> int:
    """Octal digits, or base 256 if the first bit is set (GNU, for large values)."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip()
    try:
        value = int(digits or b"0", 8)
    except ValueError:
        value = -1
    if value < 0:
        raise BadTar("it holds an invalid number")
    return value


def _name(header: bytes) -> str:
    name, prefix = _text(header[:100]), ""
    if header[257:263] == b"ustar\0":
        prefix = _text(header[345:500])
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")


def _attribute(field: bytes, extended: str, most: int) -> int:
    """The value of an extended header if there is one, else the field's; 0 if it is invalid."""
    try:
        value = int(extended.partition(".")[0]) if extended else _number(field)
    except (BadTar, ValueError):
        return 0
    return value if 0 <= value <= most else 0


def _read_pax(records: bytes, extended: dict[str, str]) -> None:
    """Adds the known keys of a pax header to `extended`. Its records are `<length> <key>=<value>\\n`."""
    at = 0
    while at < len(records) and records[at] != 0:
        digits, space, _ = records[at : at + 12].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record = records[at : at + length]
        if length <= len(digits) + 1 or not record.endswith(b"\n") or len(record) != length:
            raise BadTar("it holds a damaged pax header")
        key, _, value = record[len(digits) + 1 : -1].partition(b"=")
        if key.startswith(b"GNU.sparse."):
            raise BadTar("it holds a sparse entry, which is not supported")
        if key == b"size":
            if not value.isdigit() or len(value) > 20:
                raise BadTar("it holds a damaged pax header")
            extended["size"] = value.decode()
        elif (word := key.decode(errors="replace")) in _READ:
            extended[word] = _text(value)
        at += length
