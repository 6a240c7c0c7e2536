"""What a source brought, and the memory that spares a second download of the same bytes.

A pull always asks the source (the caller's credentials must be checked each time), but when the source's own identity of
the content is one that is stored already (OCI manifest digest; URL with a strong ETag), the body is not fetched again. The
memory is a directory of small files, one an identity; losing it costs a download, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from virtshim.model.errors import InvalidRequest
from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.image import BootFile, ImageConfig

# The disk's digest and that of the files beside it, if they can be a volume; what else came with the disk, a line each.
_MAX_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Pulled:
    """`identity` is the source's name for the content ("" if it has none), `known` the stored disk, or tree of files, that it is
    already, None if that was written; `manifest` the `sha256:` digest to list it under ("": the disk's own), `config` what it
    says of containers, `image` its id (None: the disk's digest), `boot` what came with the disk. `tree` names its files, written
    or not, unless it is known; without `has_disk` they are all that it has. `may_be_file`: what was taken for a disk is a file,
    if it proves to be none."""

    identity: str
    known: ImageDigest | None = None
    manifest: str = ""
    config: ImageConfig = ImageConfig()
    image: ImageId | None = None
    boot: Sequence[tuple[BootFile, Path]] = ()
    tree: ImageDigest | None = None
    has_disk: bool = True
    may_be_file: bool = False


class StoredDiskLookup(Protocol):
    def __call__(self, identity: str) -> ImageDigest | None:
        """The stored disk that this identity stands for."""


class PullCache:
    """Identities and the disks they stood for, below `directory`."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def digest(self, identity: str) -> ImageDigest | None:
        try:
            return _digests(self._file(identity))[0]
        except (OSError, InvalidRequest):
            return None

    def tree(self, identity: str) -> ImageDigest | None:
        """The files that came with that disk; None if there were none, or none that a volume can have."""
        try:
            _, *trees = _digests(self._file(identity))
        except (OSError, InvalidRequest):
            return None
        return trees[0] if trees else None

    def boot(self, identity: str) -> tuple[BootFile, ...]:
        """What came with that disk."""
        try:
            words = [line.split(" ") for line in _lines(self._file(identity))[1:]]
            return tuple(BootFile(path, ImageDigest(digest), int(size)) for digest, size, path in words)
        except (OSError, ValueError, InvalidRequest):
            return ()

    def remember(
        self, identity: str, digest: ImageDigest, boot: Sequence[BootFile] = (), tree: ImageDigest | None = None
    ) -> None:
        """Not synced: a lost or torn file is read as unknown."""
        final = self._file(identity)
        half = final.with_name(f".{final.name}.{os.urandom(4).hex()}")
        try:
            first = f"{digest} {tree}" if tree else str(digest)
            half.write_text("\n".join([first, *(f"{one.digest} {one.size} {one.path}" for one in boot)]) + "\n")
            half.replace(final)
        except OSError:
            half.unlink(missing_ok=True)

    def keep_only(self, digests: frozenset[ImageDigest]) -> None:
        """Forgets every identity whose disk is not among these."""
        with contextlib.suppress(FileNotFoundError):
            for entry in list(self._directory.iterdir()):
                try:
                    is_stored = _digests(entry)[0] in digests
                except (OSError, InvalidRequest):
                    is_stored = False
                if not is_stored or entry.name.startswith("."):
                    entry.unlink(missing_ok=True)

    def _file(self, identity: str) -> Path:
        return self._directory / hashlib.sha256(identity.encode()).hexdigest()


def _digests(file: Path) -> list[ImageDigest]:
    """At least one. Raises OSError, InvalidRequest."""
    return [ImageDigest(word) for word in _lines(file)[0].split(" ")]


def _lines(file: Path) -> list[str]:
    """At least one."""
    with file.open("rb") as opened:
        return opened.read(_MAX_BYTES).decode(errors="replace").strip().split("\n")
