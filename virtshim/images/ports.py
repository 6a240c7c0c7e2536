"""Ports of the image store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.image import BootFile, Credentials, DiskFormat, FilesystemUsage, Image, ImageConfig, PullProgress


@dataclass(frozen=True, slots=True)
class FetchedImage:
    """The result of a pull. `digest`: of the disk. `tree`: the image's files; None if they cannot be a volume; the same as
    `digest` if the image has no disk. `tag`: the full `name:tag` ("" when pulled by digest). `repo_digest`: `name@sha256:...`
    ("" if the source has none). `config`: the image's settings for containers. `boot`: its files in /boot."""

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


@dataclass(frozen=True, slots=True)
class SentDisk:
    """A disk that a caller sends, plain or packed by gzip, xz or zstd. `total`: its bytes as sent, 0 if unknown. `chunks`: raises
    ShimError if the caller breaks off."""

    total: int
    chunks: Iterator[bytes]


class ImageNotes(Protocol):
    """Copies of images' records, in case the database is lost. Failures are only logged, because the next start corrects missing
    and surplus copies."""

    def keep(self, image: Image) -> None: ...

    def forget(self, image: ImageId) -> None: ...

    def all(self) -> Sequence[Image]:
        """All readable copies."""


class BootFiles(Protocol):
    """Files from images' /boot, by digest."""

    def path(self, digest: ImageDigest) -> str:
        """Absolute path of the stored file, even if it does not exist."""

    def stored(self) -> frozenset[ImageDigest]:
        """Digests of all complete files."""

    def keep_only(self, digests: frozenset[ImageDigest]) -> None:
        """Removes all others."""


class ImageFiles(Protocol):
    """Pulls images, and stores their disks, boot files and trees of files by digest."""

    @property
    def boot(self) -> BootFiles: ...

    def fetch(self, reference: str, credentials: Credentials | None, cancelled: threading.Event) -> FetchedImage:
        """Downloads the image, checks its digest, verifies the disk with qemu-img, and stores it. Always contacts the source,
        because it must check the credentials each time. Content that is stored already is not stored twice. Concurrent fetches
        are safe. Errors: InvalidRequest (malformed reference; unusable or dangerous image), NotFound, PermissionRefused,
        Unavailable, ResourceExhausted, DeadlineExceeded (`cancelled` was set). A failure leaves nothing behind."""

    def load(self, reference: str, sent: SentDisk, cancelled: threading.Event) -> FetchedImage:
        """Stores a disk that the caller sends as `fetch` stores a downloaded one. A digest in the reference must match the bytes
        that are sent. Errors as of `fetch`."""

    def path(self, digest: ImageDigest, below: str | None = None) -> str:
        """Absolute path of the stored disk, even if it does not exist. With `below`: the path of a directory in the tree, ""
        for its root. Links in the tree are followed within it, and the path has none. Raises NotFound if there is no such
        directory, InvalidRequest if its name is not UTF-8."""

    def format_of(self, digest: ImageDigest) -> DiskFormat:
        """The format of a stored disk, even if no record lists it. Raises NotFound."""

    def delete(self, digest: ImageDigest) -> None: ...

    def stored(self) -> frozenset[ImageDigest]:
        """Digests of all complete files and trees."""

    def sweep(self) -> None:
        """Removes unfinished files of an earlier process. Called once at start, before any fetch."""

    def filesystem_usage(self, *of: ImageDigest) -> FilesystemUsage:
        """The space that these disks and trees take, or all if none are given. Missing ones count nothing; a disk that is also
        one of the files counts once."""

    def under_way(self) -> Sequence[PullProgress]:
        """Running downloads, the oldest first."""
