"""Image files."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.image import BootFile, Credentials, DiskFormat, FilesystemUsage, Image, ImageConfig, PullProgress


@dataclass(frozen=True, slots=True)
class FetchedImage:
    """What a pull brought: image `id`, on the disk `digest`, its files `tree` (None: none that a volume can have; the same as the
    digest: it has no disk). `tag` is the full `name:tag` to list it under ("" when pulled by digest), `repo_digest` the
    `name@sha256:...` form ("" if the source has none), `config` what it says of containers, `boot` what it has in /boot."""

    id: ImageId
    digest: ImageDigest
    tag: str
    repo_digest: str
    size: int
    virtual_size: int
    format: DiskFormat
    config: ImageConfig = ImageConfig()
    boot: tuple[BootFile, ...] = ()
    tree: ImageDigest | None = None


class ImageNotes(Protocol):
    """Copies of images' records, for the case that the database is lost. What fails is logged: a copy too few, or too many, is
    noticed at the next start."""

    def keep(self, image: Image) -> None: ...

    def forget(self, image: ImageId) -> None: ...

    def all(self) -> Sequence[Image]:
        """All that can be read."""


class BootFiles(Protocol):
    """What images have in /boot, by digest."""

    def path(self, digest: ImageDigest) -> str:
        """Absolute path of the stored file, whether or not it is there."""

    def stored(self) -> frozenset[ImageDigest]:
        """Digests of all complete files."""

    def keep_only(self, digests: frozenset[ImageDigest]) -> None:
        """All others are gone when it returns."""


class ImageFiles(Protocol):
    """Disk files, what comes with them, and trees of files, by digest, and the sources they come from."""

    @property
    def boot(self) -> BootFiles: ...

    def fetch(self, reference: str, credentials: Credentials | None, cancelled: threading.Event) -> FetchedImage:
        """Downloads, checks the digest, verifies a disk with qemu-img, stores. Always contacts the source (credentials must be
        checked each time); content already there is not stored twice. Concurrent fetches of one content are safe.
        Errors: InvalidRequest (malformed reference; unusable or dangerous image), NotFound, PermissionRefused,
        Unavailable, ResourceExhausted, DeadlineExceeded (`cancelled` was set). A failure leaves nothing behind."""

    def path(self, digest: ImageDigest, below: str | None = None) -> str:
        """Absolute path of the stored file, whether or not it is there. With `below`, of a tree's own directory (""), or of one
        in it; links in the tree lead nowhere else, and none is in the path. Raises NotFound for such, InvalidRequest for one
        whose name is no text."""

    def format_of(self, digest: ImageDigest) -> DiskFormat:
        """Of a file that was stored; also of one that no record lists any more. Raises NotFound."""

    def delete(self, digest: ImageDigest) -> None: ...

    def stored(self) -> frozenset[ImageDigest]:
        """Digests of all complete files and trees."""

    def sweep(self) -> None:
        """Removes half-made files of an earlier process. Called once at start, before any fetch."""

    def filesystem_usage(self, *of: ImageDigest) -> FilesystemUsage:
        """What these take on disk, and nothing for those that are gone; a disk that is among the files counts once. Without any:
        what all do."""

    def under_way(self) -> Sequence[PullProgress]:
        """Downloads, oldest first."""
