"""Volumes whose files kubelet writes itself (configMap, secret, downwardAPI, projected): a guest gets copies of them. No I/O.

Such a volume changes as a whole: what it holds lies in a directory of its own, `..data` is a link to that, and each name that a
container sees is a link through `..data`. So whoever swaps that one link last shows all of the new files at once.
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

# Of a volume: bytes in its files, as many as Kubernetes puts into a Secret or ConfigMap; files, directories and links; levels.
MAX_BYTES: Final = 1 << 20
MAX_ENTRIES: Final = 4096
MAX_DEPTH: Final = 32
# Of all of a container: of that many pages of the guest's memory twice as many are needed while they are renewed.
MAX_ALL_BYTES: Final = 8 << 20
_PAGE: Final = 4096

# `shared`: nothing is copied.
SHARED_ANNOTATION: Final = "virtshim.io/kubelet-volumes"

DATA: Final = "..data"
_DATA_TARGET: Final = re.compile(r"\.\.[A-Za-z0-9][A-Za-z0-9_.:+-]{0,200}")
_END: Final = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class CopiedVolume:
    """`guest`: its normal path there. `host`: a directory or a file. `renewed`: kubelet writes it anew now and then, and the
    guest gets that; a part of a volume (subPath) stays as it is, as in a container. `written`: nothing is mounted; the guest's
    own file has that content, by the agent (cloud-init has its own way), and a guest that does not take it is none the worse."""

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
    """`path`: below the volume, "" for the volume itself. `content` of a file, `target` of a link. `changed`: seconds."""

    path: str
    kind: EntryKind
    mode: int
    uid: int
    gid: int
    changed: int = 0
    content: bytes = b""
    target: str = ""

    def __repr__(self) -> str:  # what a file holds may be a secret
        return f"Entry({self.path!r}, {self.kind.value}, {self.mode:o}, {self.uid}:{self.gid})"


@dataclass(frozen=True, slots=True)
class Packed:
    """A volume as members of a tar archive, and what tells it from every other."""

    name: str
    digest: str
    members: bytes

    def __repr__(self) -> str:
        return f"Packed({self.name!r}, {self.digest!r}, {len(self.members)} bytes)"


def copy_name(number: int) -> str:
    """What the copy of that volume is called in the guest, apart from the path at which it is mounted."""
    return f"c{number}"


def paths_of(copies: Iterable[CopiedVolume], names: Container[str]) -> tuple[str, ...]:
    """Where those with these names are in the guest."""
    return tuple(volume.guest for at, volume in enumerate(copies) if copy_name(at) in names)


def is_swapped(target: str) -> bool:
    """Whether kubelet swaps a volume whose `..data` leads there."""
    return _DATA_TARGET.fullmatch(target) is not None


def packed(name: str, entries: Iterable[Entry]) -> Packed:
    """The same for the same entries. Beside the volume's own the archive has a file with its digest."""
    entries = sorted(entries, key=lambda entry: entry.path)
    members = _members([_member(name, entry) for entry in entries])
    digest = hashlib.sha256(members).hexdigest()
    told = Entry("", EntryKind.FILE, 0o600, 0, 0, content=f"{digest}\n".encode())
    return Packed(name, digest, members + _members([_member(f"{name}.digest", told)]))


def archive(volumes: Iterable[Packed]) -> bytes:
    """A tar archive of them."""
    return b"".join(volume.members for volume in volumes) + _END


def size_of(entries: Iterable[Entry]) -> int:
    """What they take of a guest's memory, in bytes: each at least a page, and whole pages."""
    return sum(max(1, -(-len(entry.content) // _PAGE)) * _PAGE for entry in entries)


def check_size(total: int) -> None:
    """`total`: of all, as `size_of` counts. Raises InvalidRequest."""
    if total > MAX_ALL_BYTES:
        raise InvalidRequest(
            f"config.mounts: the configMap, secret, downwardAPI and projected volumes of the container take {total} bytes, each "
            f"file whole pages of {_PAGE}; a virtual machine gets copies of {MAX_ALL_BYTES} bytes at most: mount fewer, or "
            "single keys by subPath"
        )


def too_large(volume: CopiedVolume, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"config.mounts[{escaped(volume.guest, 200)}]: the volume has more than {what}, of which a virtual machine gets no "
        "copy; make it smaller, or mount single keys by subPath"
    )


def odd_file(volume: CopiedVolume, path: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"config.mounts[{escaped(volume.guest, 200)}].host_path: {escaped(path, 300)} is {what}, of which there is no copy; "
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
    """Without an end: more may follow. GNU's form, which busybox reads too, for names and links of any length."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
        size = tar.offset
    return written.getvalue()[:size]
