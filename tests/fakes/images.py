"""Image sources and the file store in memory."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from fakes.journal import WAIT_LIMIT

from virtshim.images.ports import FetchedImage, SentDisk
from virtshim.model.errors import DeadlineExceeded, InternalError, InvalidRequest, NotFound, PermissionRefused
from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.image import (
    BootFile,
    Credentials,
    DiskFormat,
    FilesystemSpace,
    FilesystemUsage,
    ImageConfig,
    PullProgress,
)
from virtshim.model.image_name import ImageName

TREE_BYTES = 7
"""What the files of any image take."""


@dataclass(frozen=True)
class Published:
    """An image that a source serves under one name. `password` "" lets everybody in."""

    content: bytes
    password: str = ""
    config: ImageConfig = ImageConfig()
    # Directories among its files, "" for their root; () for a plain disk. Without `has_disk` it has files only.
    directories: tuple[str, ...] = ()
    has_disk: bool = True
    # Set: it is a plain file, whose bytes are the config of the image that this content and that config make.
    said: ImageConfig | None = None
    boot: tuple[BootFile, ...] = ()

    @property
    def digest(self) -> ImageDigest:
        of_it = _sha256(self.content) if self.said is None else Published(self.content, config=self.said).id.value
        return ImageDigest(of_it)

    @property
    def tree(self) -> ImageDigest | None:
        return ImageDigest(_sha256(b"files of " + self.content)) if self.directories else None

    @property
    def id(self) -> ImageId:
        """The image id: for a plain disk its digest, otherwise the manifest's."""
        if self.config == ImageConfig():
            return ImageId(self.digest.value)
        return ImageId(_sha256(self.content + repr(self.config).encode()))


def _sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class FakeBootFiles:
    """Implements `virtshim.images.ports.BootFiles`."""

    def __init__(self) -> None:
        self.files: set[ImageDigest] = set()

    def path(self, digest: ImageDigest) -> str:
        return f"/images/boot/{digest.hex}"

    def stored(self) -> frozenset[ImageDigest]:
        return frozenset(self.files)

    def keep_only(self, digests: frozenset[ImageDigest]) -> None:
        self.files &= digests


class FakeImageFiles:
    """Implements `virtshim.images.ports.ImageFiles`. `published` is the outside world, `files` the complete files here,
    `unfinished` what a dead process left. While `stalled`, downloads wait until they are cancelled. One that was cancelled sets
    `gave_up`. Their file system holds `capacity` bytes, of which other things take `others`."""

    def __init__(self) -> None:
        self.published: dict[str, Published] = {}
        self.files: dict[ImageDigest, int] = {}
        self.boot = FakeBootFiles()
        self.trees: dict[ImageDigest, tuple[str, ...]] = {}
        self.unfinished: set[str] = set()
        self.stalled = False
        self.capacity, self.others = 1 << 40, 0
        self.waiting: list[str] = []
        self.gave_up = threading.Event()
        self.fetched: list[tuple[str, Credentials | None]] = []

    def publish(self, name: str, content: bytes, password: str = "", config: ImageConfig | None = None) -> ImageDigest:
        image = self.published[ImageName.parse(name).tagged] = Published(content, password, config or ImageConfig())
        return image.digest

    def publish_files(self, name: str, *directories: str, has_disk: bool = False) -> ImageDigest:
        """Publishes an image for volumes, and for VMs too if it has a disk. Returns its files' digest."""
        content = f"{name} {directories}".encode()
        image = Published(content, config=ImageConfig(user="7"), directories=("", *directories), has_disk=has_disk)
        self.published[ImageName.parse(name).tagged] = image
        assert image.tree is not None
        return image.tree

    def fetch(self, reference: str, credentials: Credentials | None, cancelled: threading.Event) -> FetchedImage:
        name = ImageName.parse(reference)
        self._give_up_if(cancelled, reference)
        self.fetched.append((reference, credentials))
        image = self._published(name)
        if image is None:
            raise NotFound(f"image {reference!r} is not at its source")
        if image.password and (credentials is None or credentials.password != image.password):
            raise PermissionRefused(f"the registry refuses the credentials for {reference!r}")
        if self.stalled:
            self.waiting.append(reference)
            assert cancelled.wait(WAIT_LIMIT), "nobody gave the stalled download up"
            self.waiting.remove(reference)
        self._give_up_if(cancelled, reference)
        self.boot.files |= {one.digest for one in image.boot}
        if image.tree is not None:
            self.trees[image.tree] = image.directories
        if image.has_disk:
            self.files[image.digest] = len(image.content)
        return FetchedImage(
            id=image.id,
            digest=image.digest if image.has_disk or image.tree is None else image.tree,
            tree=image.tree,
            tag="" if name.digest else name.tagged,
            repo_digest=name.with_digest(image.id.value),
            size=len(image.content),
            virtual_size=len(image.content) * 8,
            format=DiskFormat.QCOW2,
            config=image.config,
            boot=image.boot,
        )

    def load(self, reference: str, sent: SentDisk, cancelled: threading.Event) -> FetchedImage:
        name = ImageName.parse(reference)
        self._give_up_if(cancelled, reference)
        content = b"".join(sent.chunks)
        if sent.total not in (0, len(content)):
            raise InvalidRequest(f"image {reference!r}: {len(content)} bytes where {sent.total} were announced")
        if name.digest not in (None, _sha256(content)):
            raise InvalidRequest(f"image {reference!r} has another digest")
        self._give_up_if(cancelled, reference)
        digest = ImageDigest(_sha256(content))
        self.files[digest] = len(content)
        found = self.describe(digest)
        tag = "" if name.digest else name.tagged
        return dataclasses.replace(found, tag=tag, repo_digest=name.with_digest(digest.value))

    def _give_up_if(self, cancelled: threading.Event, reference: str) -> None:
        if cancelled.is_set():
            self.gave_up.set()
            raise DeadlineExceeded(f"the pull of {reference!r} was given up")

    def half_fetch(self, reference: str, credentials: Credentials | None, cancelled: threading.Event) -> None:
        self.unfinished.add(reference)

    def path(self, digest: ImageDigest, below: str | None = None) -> str:
        if below is None:
            return f"/images/{digest.hex}"
        if below not in self.trees.get(digest, ()):
            raise NotFound(f"it has no directory {below}; correct the volumeMount's subPath")
        return f"/images/trees/{digest.hex}/root/{below}".rstrip("/")

    def format_of(self, digest: ImageDigest) -> DiskFormat:
        if digest not in self.files:
            raise NotFound(f"image {digest} is not here")
        return DiskFormat.QCOW2

    def delete(self, digest: ImageDigest) -> None:
        self.files.pop(digest, None)
        self.trees.pop(digest, None)

    def stored(self) -> frozenset[ImageDigest]:
        return frozenset((*self.files, *self.trees))

    def describe(self, digest: ImageDigest) -> FetchedImage:
        if digest in self.trees:
            return FetchedImage(ImageId(digest.value), digest, "", "", TREE_BYTES, 0, DiskFormat.RAW, tree=digest)
        size = self.files.get(digest)
        if size is None:
            raise InternalError(f"image {digest} is not here")
        return FetchedImage(ImageId(digest.value), digest, "", "", size, size * 8, DiskFormat.QCOW2)

    def sweep(self) -> None:
        self.unfinished.clear()

    def filesystem_usage(self, *of: ImageDigest) -> FilesystemUsage:
        counted = {one for one in (of or (*self.files, *self.trees)) if one in self.files or one in self.trees}
        used = sum(self.files.get(one, TREE_BYTES) for one in counted)
        taken = self.others + sum(self.files.values()) + TREE_BYTES * len(self.trees)
        space = FilesystemSpace(self.capacity, self.capacity - taken)
        return FilesystemUsage("/images", used, len(counted), 1, space)

    def under_way(self) -> Sequence[PullProgress]:
        return [PullProgress(reference, 3, 10, 1) for reference in self.waiting]

    def _published(self, name: ImageName) -> Published | None:
        if name.digest is None:
            return self.published.get(name.tagged)
        return next((image for image in self.published.values() if image.id.value == name.digest), None)
