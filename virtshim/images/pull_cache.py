"""The result of a download, and a cache that saves downloading the same content twice.

A pull always asks the source, because it must check the caller's credentials each time. But if the source's identity of the
content (OCI manifest digest, or URL with a strong ETag) belongs to a stored disk, the body is not downloaded again. The cache
is a directory with a small file per identity. Losing it only costs downloads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from virtshim.model.errors import InvalidRequest
from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.image import BootFile, ImageConfig

# A file's first line has the disk's digest, and the tree's if the files can be a volume. Then comes a line per boot file.
_MAX_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Pulled:
    """`identity`: the source's name for the content ("" if it has none). `known`: the disk or tree, if it was stored already;
    None if it was downloaded. `manifest`: the `sha256:` digest to list the image under ("" for the disk's digest). `config`:
    the image's settings for containers. `image`: its id (None for the disk's digest). `boot`: its files in /boot. `tree`: the
    name of its files, ignored if `known` is set. `has_disk`: false for an image that has only files. `may_be_file`: if the disk
    proves unusable, it is an ordinary file."""

    identity: str
    known: ImageDigest | None = None
    manifest: str = ""
    config: ImageConfig = ImageConfig()
    image: ImageId | None = None
    boot: Sequence[tuple[BootFile, Path]] = ()
    tree: ImageDigest | None = None
    has_disk: bool = True
    may_be_file: bool = False


StoredDiskLookup = Callable[[str], ImageDigest | None]
"""Identity of a content -> the stored disk; None if it is unknown."""


class PullCache:
    """The cache, in `directory`."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def digest(self, identity: str) -> ImageDigest | None:
        try:
            return _digests(self._file(identity))[0]
        except (OSError, InvalidRequest):
            return None

    def tree(self, identity: str) -> ImageDigest | None:
        """The tree of files that came with the disk; None if there is none, or it cannot be a volume."""
        try:
            _, *trees = _digests(self._file(identity))
        except (OSError, InvalidRequest):
            return None
        return trees[0] if trees else None

    def boot(self, identity: str) -> tuple[BootFile, ...]:
        """The boot files that came with the disk."""
        try:
            words = [line.split(" ") for line in _lines(self._file(identity))[1:]]
            return tuple(BootFile(path, ImageDigest(digest), int(size)) for digest, size, path in words)
        except (OSError, ValueError, InvalidRequest):
            return ()

    def remember(
        self, identity: str, digest: ImageDigest, boot: Sequence[BootFile] = (), tree: ImageDigest | None = None
    ) -> None:
        """Does not sync: a lost or torn file only means that the identity is unknown."""
        final = self._file(identity)
        half = final.with_name(f".{final.name}.{os.urandom(4).hex()}")
        try:
            first = f"{digest} {tree}" if tree else str(digest)
            half.write_text("\n".join([first, *(f"{one.digest} {one.size} {one.path}" for one in boot)]) + "\n")
            half.replace(final)
        except OSError:
            half.unlink(missing_ok=True)

    def keep_only(self, digests: frozenset[ImageDigest]) -> None:
        """Forgets all identities of other disks."""
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
    """The digests in the file's first line, at least one. Raises OSError, InvalidRequest."""
    return [ImageDigest(word) for word in _lines(file)[0].split(" ")]


def _lines(file: Path) -> list[str]:
    """The file's lines, at least one. Raises OSError."""
    with file.open("rb") as opened:
        return opened.read(_MAX_BYTES).decode(errors="replace").strip().split("\n")
