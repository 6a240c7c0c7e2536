"""Volumes whose files kubelet writes (configMap, secret, downwardAPI, projected). The guest gets copies of them. No
I/O.

kubelet replaces the content of such a volume at once: the files are in a directory of their own, the link `..data`
leads to that directory, and each name that a container sees is a link through `..data`. Swapping `..data` last shows
all new files together.
"""

from __future__ import annotations

import enum
import hashlib
import io
import re
import tarfile
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Final

from virtshim.model.errors import InvalidRequest
from virtshim.model.text import escaped

# Limits of one volume: bytes in its files (as many as a Secret or ConfigMap may have); files, directories and links;
# levels.
MAX_BYTES: Final = 1 << 20
MAX_ENTRIES: Final = 4096
MAX_DEPTH: Final = 32
# Limit for all volumes of a container. A renewal needs twice as many pages of the guest's memory for a moment.
MAX_ALL_BYTES: Final = 8 << 20
_PAGE: Final = 4096

# The annotation's value `shared` turns copying off.
SHARED_ANNOTATION: Final = "virtshim.io/kubelet-volumes"

DATA: Final = "..data"
_DATA_TARGET: Final = re.compile(r"\.\.[A-Za-z0-9][A-Za-z0-9_.:+-]{0,200}")
_END: Final = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class CopiedVolume:
    """`guest`: its normalized path in the guest. `host`: a directory or a file. `renewed`: whether the guest gets
    kubelet's later changes; a part of a volume (subPath) stays as it is, as in a container. `written`: nothing is
    mounted, and the agent writes the content into the guest's own file (cloud-init does the same its own way). A guest
    that refuses it is not in trouble."""

    guest: str
    host: str
    readonly: bool = True
    renewed: bool = True
    written: bool = False


class EntryKind(enum.Enum):
    DIRECTORY = "directory"
    FILE = "file"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Entry:
    """`path`: below the volume, "" for the volume itself. `content`: of a file. `target`: of a link. `changed`: seconds
    since the epoch."""

    path: str
    kind: EntryKind
    mode: int
    uid: int
    gid: int
    changed: int = 0
    content: bytes = b""
    target: str = ""

    def __repr__(self) -> str:  # without the content, which may be a secret
        return f"Entry({self.path!r}, {self.kind.value}, {self.mode:o}, {self.uid}:{self.gid})"


@dataclass(frozen=True, slots=True)
class Packed:
    """A volume as members of a tar archive, with a digest that identifies this content."""

    name: str
    digest: str
    members: bytes

    def __repr__(self) -> str:
        return f"Packed({self.name!r}, {self.digest!r}, {len(self.members)} bytes)"


def copy_name(number: int) -> str:
    """The copy's name in the guest, which does not depend on its mount path."""
    return f"c{number}"


def paths_of(copies: Iterable[CopiedVolume], names: Container[str]) -> tuple[str, ...]:
    """The paths in the guest of the copies with these names."""
    return tuple(volume.guest for at, volume in enumerate(copies) if copy_name(at) in names)


def is_swapped(target: str) -> bool:
    """Whether kubelet swaps the volume whose `..data` leads to `target`."""
    return _DATA_TARGET.fullmatch(target) is not None


def packed(name: str, entries: Iterable[Entry]) -> Packed:
    """Equal entries give equal archives. The archive also has a file with the volume's digest."""
    entries = sorted(entries, key=lambda entry: entry.path)
    members = _members([_member(name, entry) for entry in entries])
    digest = hashlib.sha256(members).hexdigest()
    told = Entry("", EntryKind.FILE, 0o600, 0, 0, content=f"{digest}\n".encode())
    return Packed(name, digest, members + _members([_member(f"{name}.digest", told)]))


def archive(volumes: Iterable[Packed]) -> bytes:
    """One tar archive with all volumes."""
    return b"".join(volume.members for volume in volumes) + _END


def size_of(entries: Iterable[Entry]) -> int:
    """How many bytes of guest memory the entries take: each takes whole pages, and at least one."""
    return sum(max(1, -(-len(entry.content) // _PAGE)) * _PAGE for entry in entries)


def check_size(total: int) -> None:
    """Raises InvalidRequest if `total` bytes, counted by `size_of` over all volumes, are too many."""
    if total > MAX_ALL_BYTES:
        raise InvalidRequest(
            f"config.mounts: the configMap, secret, downwardAPI and projected volumes of the container take {total} bytes, "
            f"counted in whole pages of {_PAGE} a file; a virtual machine gets copies of {MAX_ALL_BYTES} bytes at most: mount "
            "fewer volumes, or single keys by subPath"
        )


def too_large(volume: CopiedVolume, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"config.mounts[{escaped(volume.guest, 200)}]: the volume has more than {what}, which is too much to copy into a virtual "
        "machine; make it smaller, or mount single keys by subPath"
    )


def odd_file(volume: CopiedVolume, path: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"config.mounts[{escaped(volume.guest, 200)}].host_path: {escaped(path, 300)} is {what}, which cannot be copied; "
        "remove it"
    )


def _member(name: str, entry: Entry) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(f"{name}/{entry.path}" if entry.path else name)
    info.type = {
        EntryKind.DIRECTORY: tarfile.DIRTYPE,
        EntryKind.FILE: tarfile.REGTYPE,
        EntryKind.LINK: tarfile.SYMTYPE,
    }[entry.kind]
    info.mode, info.uid, info.gid, info.mtime = entry.mode, entry.uid, entry.gid, entry.changed
    info.size, info.linkname = len(entry.content), entry.target
    return info, entry.content


def _members(members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """The members without the archive's end, so that more may follow. GNU's format has long names, and busybox reads it
    too."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
        size = tar.offset
    return written.getvalue()[:size]
