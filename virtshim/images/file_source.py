"""Disk images that are files of the node, in directories that the operator lists, or that an operator sends."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final

from virtshim.images.downloads.places import Landing
from virtshim.images.layer_child import Layer, Unpacking
from virtshim.images.names import FileLocation
from virtshim.images.ports import SentDisk
from virtshim.images.pull_cache import Pulled
from virtshim.images.registries.repository import verified
from virtshim.model.errors import InternalError, InvalidRequest, NotFound, PermissionRefused, Unavailable
from virtshim.model.image_name import ImageName

# No link is followed, and no FIFO blocks the open.
_SAFE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# `DiskWriter` turns chunks of zeros up to this size into holes.
_CHUNK: Final = 1 << 18
# The first bytes of gzip, xz and zstd.
_PACKED: Final = (b"\x1f\x8b", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")


def copy(
    location: FileLocation,
    directories: Sequence[str],
    landing: Landing,
    unpacking: Unpacking,
    progress: Callable[[], None],
) -> Pulled:
    """Copies the file, unless its disk is stored already. `directories`: images.file_dirs. A digest in the name must match the
    file, packed or unpacked. Raises PermissionRefused for a file in none of the directories."""
    with _opened(location, directories) as file:
        found = os.fstat(file)
        identity = _identity(location, found)
        wanted = location.name.digest
        content = f"{identity} {wanted}" if wanted else identity
        stored = landing.claim(content, progress)
        if stored is not None:
            return Pulled(content, stored)
        sent = SentDisk(found.st_size, _chunks(file, progress))
        _write(location.name, location.path, sent, landing, unpacking, is_packed=location.is_packed)
        if _identity(location, os.fstat(file)) != identity:
            raise Unavailable(f"image {str(location.name)!r}: the file changed while it was copied; pull it again")
    return Pulled(content)


def receive(name: ImageName, sent: SentDisk, landing: Landing, unpacking: Unpacking) -> Pulled:
    """Takes a disk that an operator sends."""
    first = next(sent.chunks, b"")
    whole = SentDisk(sent.total, itertools.chain((first,), sent.chunks))
    _write(name, str(name), whole, landing, unpacking, is_packed=first.startswith(_PACKED))
    return Pulled("")


def _write(
    name: ImageName, what: str, sent: SentDisk, landing: Landing, unpacking: Unpacking, *, is_packed: bool
) -> None:
    """`what`: the file's name in errors."""
    chunks, disk = sent.chunks, landing.disk()
    if name.digest is not None:
        chunks = verified(chunks, name.digest, None, f"the file of image {str(name)!r}")
    if is_packed:
        layer = Layer(what, "", "", lambda: _each(chunks), is_disk=True)
        unpacking.run(str(name), [layer], disk, sent.total or None)
    else:
        if sent.total:
            disk.expect(sent.total)
        for chunk in chunks:
            disk.write(chunk)


@contextlib.contextmanager
def _opened(location: FileLocation, directories: Sequence[str]) -> Iterator[int]:
    image = str(location.name)
    above = next((one for one in directories if location.path.startswith(f"{one.rstrip('/')}/")), None)
    if above is None:
        raise PermissionRefused(
            f"image {image!r}: {location.path} is in none of the directories that images are taken from on this node "
            "(images.file_dirs); on the node, store the file as an image (virtshim load FILE NAME), or list its directory"
        )
    *between, name = location.path[len(above.rstrip("/")) + 1 :].split("/")
    with contextlib.ExitStack() as opened:
        try:
            here = os.open(above, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, here)
            for directory in between:
                here = os.open(directory, os.O_PATH | os.O_DIRECTORY | _SAFE, dir_fd=here)
                opened.callback(os.close, here)
            file = os.open(name, os.O_RDONLY | _SAFE, dir_fd=here)
            opened.callback(os.close, file)
        except FileNotFoundError as exc:
            raise NotFound(f"image {image!r}: {location.path} does not exist on this node") from exc
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR):
                raise _not_regular(location) from exc
            raise InternalError(f"image {image!r}: {location.path} cannot be opened: {exc.strerror}") from exc
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise _not_regular(location)
        yield file


def _not_regular(location: FileLocation) -> InvalidRequest:
    return InvalidRequest(
        f"image {str(location.name)!r}: {location.path} is not a regular file, or is reached through a symbolic link; "
        "name the file itself"
    )


def _identity(location: FileLocation, found: os.stat_result) -> str:
    """Two files with the same identity have the same bytes, as far as the file system shows."""
    return f"file:{location.path} {found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def _chunks(file: int, progress: Callable[[], None]) -> Iterator[bytes]:
    while chunk := os.read(file, _CHUNK):
        yield chunk
        progress()


def _each(chunks: Iterator[bytes]) -> Generator[bytes, None, None]:
    yield from chunks
