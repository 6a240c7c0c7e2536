"""Pulls, lists and removes images, and decides which files containers still need."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import structlog

from virtshim.images.ports import FetchedImage, ImageNotes, SentDisk
from virtshim.metrics import observed
from virtshim.model.container import Container
from virtshim.model.errors import Aborted, InvalidRequest, NotFound, ShimError
from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.image import UNKNOWN_IMAGE, Credentials, Image, ImageConfig
from virtshim.model.image_name import ImageName, familiar, find_image, find_named, looks_like_id
from virtshim.store.ports import KnownImageFiles, StateRecords
from virtshim.system.clock import Clock
from virtshim.system.live import Live
from virtshim.volumes.shares import SharedVolume


def stored_images(container: Container) -> tuple[ImageDigest, ...]:
    """The disk and the volumes' trees that must stay stored while the container's record exists."""
    return (container.image, *(volume.image.tree for volume in container.spec.volumes if volume.image is not None))


log = structlog.get_logger(__name__)

# How often a pull is tried: a RemoveImage may delete the file after the download and before its record is written.
_ATTEMPTS = 3


class ImageService:
    """The image table. One lock serializes its changes; downloads run outside that lock."""

    def __init__(
        self,
        records: StateRecords,
        files: KnownImageFiles,
        notes: ImageNotes,
        clock: Clock,
        pinned: Live[Sequence[str]] | None = None,
        vm_images: Callable[[], Collection[ImageDigest]] = frozenset,
    ) -> None:
        """`pinned`: names of images to list as pinned. `vm_images`: images under the root disks of VMs that outlive their
        pods."""
        self._records = records
        self.files = files
        self._notes = notes
        self._clock = clock
        self._pinned = pinned or Live(())
        self._vm_images = vm_images
        self._lock = threading.RLock()
        self._pulling: Counter[str] = Counter()

    def pull(self, reference: str, credentials: Credentials | None, cancelled: threading.Event) -> Image:
        """Always contacts the source. The image is listed when this returns."""
        fetch = functools.partial(self.files.fetch, reference, credentials, cancelled)
        return self._measured(reference, fetch, _ATTEMPTS)

    def load(self, reference: str, sent: SentDisk, cancelled: threading.Event) -> Image:
        """Stores a disk that an operator sends, as if it had been pulled by this name. images.policy does not apply,
        because it is about what pods may pull."""
        return self._measured(reference, functools.partial(self.files.load, reference, sent, cancelled), attempts=1)

    def _measured(self, reference: str, fetch: Callable[[], FetchedImage], attempts: int) -> Image:
        meter, began = observed.meter(), time.monotonic()
        meter.pulls_under_way(1)
        result, size = observed.OK, 0
        try:
            with observed.tracer().part("pull"), self._under_way(reference):
                image = self._fetched(reference, fetch, attempts)
            size = image.size
            return image
        except BaseException as exc:
            result = observed.kind_of(exc)
            raise
        finally:
            meter.pulls_under_way(-1)
            meter.tell(observed.Pulled(result, time.monotonic() - began, size))

    @contextlib.contextmanager
    def _under_way(self, reference: str) -> Iterator[None]:
        with self._lock:
            self._pulling[reference] += 1
        try:
            yield
        finally:
            with self._lock:
                self._pulling -= Counter((reference,))

    def pulling(self) -> Sequence[str]:
        """The references of running pulls."""
        with self._lock:
            return list(self._pulling)

    def _fetched(self, reference: str, fetch: Callable[[], FetchedImage], attempts: int) -> Image:
        for _ in range(attempts):
            with contextlib.suppress(Aborted):  # a stored file was removed while the source was asked
                fetched = fetch()
                with self._lock:
                    boot = {one.digest for one in fetched.boot}
                    is_here = self.files.stored().issuperset({fetched.digest, fetched.tree} - {None})
                    if is_here and boot <= self.files.boot.stored():
                        image = self._record(fetched)
                        log.info(
                            "image.pulled",
                            image=reference,
                            id=str(image.id),
                            digest=str(image.digest),
                            bytes=image.size,
                        )
                        return image
        raise Aborted(f"image {reference!r} was removed while it was pulled; pull it again")

    def _record(self, fetched: FetchedImage) -> Image:
        """Records the image. A name, in any spelling, belongs to one image only, so it is taken from the image that had it."""
        old = self._records.images.get(fetched.id)
        if old is not None and not _is_same(old, fetched):
            self._refuse_config_as_disk(fetched)
            if old.id.value != old.digest.value:
                fetched = dataclasses.replace(fetched, id=_separate_id(fetched))
                old = self._records.images.get(fetched.id)
        replaced: set[ImageDigest | None] = {old.digest, old.tree} if old else set()
        if old is not None and old.digest != fetched.digest:  # its digest is this image's config
            old = None
        image = Image(
            id=fetched.id,
            digest=fetched.digest,
            tags=_with(old.tags if old else (), fetched.tag),
            repo_digests=_with(old.repo_digests if old else (), fetched.repo_digest),
            size=fetched.size,
            virtual_size=fetched.virtual_size,
            format=fetched.format,
            pulled_at=self._clock.now_ns(),
            config=fetched.config,
            boot=fetched.boot,
            tree=fetched.tree or (old.tree if old else None),  # keep the tree if this source has only the disk
        )
        image = self._counted(image)
        self._put(image)
        for other in self._records.images.all():
            if other.id != image.id:
                self._take_names(other, fetched)
        for digest in replaced - {None, image.digest, image.tree}:
            self._collect(digest)
        self._collect_boot()
        return image

    def _counted(self, image: Image) -> Image:
        """The image with its current size on disk. Files that several images share count for each of them."""
        boot = {one.digest: one.size for one in image.boot}
        files = [digest for digest in (image.digest, image.tree) if digest is not None]
        return dataclasses.replace(image, taken=self.files.filesystem_usage(*files).used_bytes + sum(boot.values()))

    def _refuse_config_as_disk(self, fetched: FetchedImage) -> None:
        """An image's config that is published as a disk has that image's id, but must not replace the image."""
        if fetched.id.value == fetched.digest.value:
            raise InvalidRequest(
                f"the file {fetched.digest} is the configuration of an image on this node, not a disk; publish the disk"
            )

    def _take_names(self, other: Image, fetched: FetchedImage) -> None:
        """Takes the fetched image's names from `other`. If it then has no name, it is removed: an earlier version recorded the
        same image with the disk's digest as its id."""
        tags, repo_digests = _without(other.tags, fetched.tag), _without(other.repo_digests, fetched.repo_digest)
        if (tags, repo_digests) == (other.tags, other.repo_digests):
            return
        if tags or repo_digests:
            self._put(dataclasses.replace(other, tags=tags, repo_digests=repo_digests))
        else:
            self._drop(other.id)
            self._collect(other.digest, other.tree)

    def find(self, reference: str) -> Image | None:
        """Looks an image up by id, unique id prefix, tag or digest."""
        return find_image(self.all(), reference)

    def all(self) -> Sequence[Image]:
        images = self._records.images.all()
        named = [find_named(images, name) for name in self._pinned.now]
        pinned = {image.id for image in named if image is not None}
        return [dataclasses.replace(image, pinned=True) if image.id in pinned else image for image in images]

    @contextlib.contextmanager
    def pinned(self, reference: str, volumes: Sequence[SharedVolume] = ()) -> Iterator[Image]:
        """Inside the block, neither the image nor the files of `volumes` can be removed. Write a container record in the block,
        which keeps them afterwards. Raises NotFound, InvalidRequest for an image without a disk."""
        with self._lock:
            image = self.find(reference)
            if image is None:
                raise NotFound(f"image {reference[:300]!r} is not on this node; pull it first")
            if not image.has_disk:
                raise InvalidRequest(
                    f"image {reference[:300]!r} is not a VM image: it has no file below /disk, and can be a volume only; build a "
                    "containerDisk (FROM scratch, ADD disk.qcow2 /disk/), or configure the disk's path (images.disk_paths)"
                )
            for volume in volumes:
                if volume.image is not None and volume.image.tree not in self.files.stored():
                    raise Aborted(f"image {volume.image.id} was removed while its container was created; pull it again")
            yield image

    def remove(self, reference: str, unless: Callable[[Image], bool] = lambda _: False) -> int:
        """Removes the image and all its names. No error if it is missing. Its file stays while another image or a container
        uses it. Returns the bytes freed, 0 if the file stays. `unless`: called under the lock; if true, the image stays."""
        with self._lock:
            image = self.find(reference)
            if image is None or unless(image):
                return 0
            self._drop(image.id)
            self._collect(image.digest, image.tree)
            self._collect_boot()
            stays = not self.files.stored().isdisjoint((image.digest, image.tree))
        log.info("image.removed", image=reference, id=str(image.id), digest=str(image.digest))
        return 0 if stays else image.taken

    def _collect(self, *digests: ImageDigest | None) -> None:
        for digest in digests:
            if digest is not None:
                self.collect(digest)

    def collect(self, digest: ImageDigest) -> None:
        """Deletes the stored disk or tree if no image record, container or pod's disk needs it."""
        with self._lock:
            if self._may_be_needed():
                return
            if any(digest in (image.digest, image.tree) for image in self._records.images.all()):
                return
            if any(digest in stored_images(container) for container in self._records.containers.all()):
                return
            kept = self.under_kept_disks()
            if kept is None or digest in kept:
                return
            self.files.delete(digest)

    def under_kept_disks(self) -> frozenset[ImageDigest] | None:
        """The images under root disks that outlive their containers. None if one of them cannot be known."""
        of_pods = {digest for sandbox in self._records.sandboxes.all() for digest in sandbox.root_disks.values()}
        try:
            return frozenset(of_pods | set(self._vm_images()))
        except ShimError as exc:
            log.warning("image.kept", error=str(exc))
            return None

    def _collect_boot(self) -> None:
        """Deletes boot files that no image record has. VMs have their own copies."""
        if not self._records.unreadable():
            self.files.boot.keep_only(
                frozenset(one.digest for image in self._records.images.all() for one in image.boot)
            )

    def _with_stored_files(self, image: Image) -> Image:
        return image if image.tree in self.files.stored() else dataclasses.replace(image, tree=None)

    def _may_be_needed(self) -> bool:
        """Whether some record does not say which image it uses. Then no file may be deleted."""
        unknown = any(container.image == UNKNOWN_IMAGE for container in self._records.containers.all())
        return unknown or bool(self._records.unreadable())

    def adopt(self) -> None:
        """Restores records after the state database was lost. Images whose disks are stored get the records in their notes. Other
        files are recorded as plain disks, with the names that containers used for them, or only by digest. An OCI image's name is
        not given to its bare disk, which would run without the image's user and entrypoint: the next pull lists the image again,
        and need not download the disk."""
        with self._lock:
            for image in self._notes.all():
                self._adopt(image)
            known = {digest for image in self._records.images.all() for digest in (image.digest, image.tree)}
            for digest in sorted(self.files.stored() - known):
                try:
                    found = self.files.describe(digest)
                except ShimError as exc:
                    log.warning("image.not_adopted", digest=str(digest), error=str(exc))
                    continue
                if found.tree is not None:  # it is unknown to which image the files belong
                    continue
                users = [c for c in self._records.containers.all() if c.image == digest and _is_of_plain_disk(c)]
                image = self._record(found)
                for name in {name for c in users for name in (c.config.image, c.config.user_image)}:
                    with contextlib.suppress(InvalidRequest):
                        if (parsed := ImageName.parse(name)).digest is None and not looks_like_id(name):
                            image = dataclasses.replace(image, tags=_with(image.tags, parsed.tagged))
                refs = tuple(sorted({c.spec.image_ref for c in users if "@" in c.spec.image_ref}))
                self._put(dataclasses.replace(image, repo_digests=refs))
                log.warning("image.adopted", digest=str(digest), tags=image.tags)

    def _adopt(self, noted: Image) -> None:
        """Restores a record from its note if the disk is stored. Stored files need no check: they were verified when stored."""
        if noted.digest not in self.files.stored() or self._records.images.get(noted.id) is not None:
            return
        try:
            found = self.files.describe(noted.digest)
        except ShimError as exc:
            log.warning("image.not_adopted", digest=str(noted.digest), error=str(exc))
            return
        kernels = {one.digest for one in noted.boot} <= self.files.boot.stored()
        if (found.size, found.format) == (noted.size, noted.format) and kernels:
            self._put(self._with_stored_files(noted))
            log.warning("image.adopted", digest=str(noted.digest), tags=noted.tags)

    def unneeded(self) -> frozenset[ImageDigest]:
        """Stored disks and trees that no record needs."""
        needed = {digest for image in self._records.images.all() for digest in (image.digest, image.tree)}
        needed |= {digest for one in self._records.containers.all() for digest in stored_images(one)}
        kept = self.under_kept_disks()
        return frozenset() if kept is None else self.files.stored() - needed - kept

    def collect_all(self) -> None:
        """At start, deletes files that no record needs, and records whose file is gone."""
        self.files.sweep()
        with self._lock:
            stored, boot = self.files.stored(), self.files.boot.stored()
            for image in self._records.images.all():
                if image.digest not in stored or not {one.digest for one in image.boot} <= boot:
                    log.warning("image.file.missing", id=str(image.id), digest=str(image.digest))
                    self._drop(image.id)
                    continue
                now = self._counted(self._with_stored_files(image))  # an earlier version did not store the size
                if now != image:
                    self._put(now)
            for digest in stored:
                self.collect(digest)
            self._collect_boot()
            self._note_all()

    def _note_all(self) -> None:
        """Writes notes of all images, because earlier versions wrote none. While a record is unreadable, no note is deleted,
        because it may be that record's."""
        images = {image.id: image for image in self._records.images.all()}
        for image in images.values():
            self._notes.keep(image)
        if not self._records.unreadable():
            for image in self._notes.all():
                if image.id not in images:
                    self._notes.forget(image.id)

    def _put(self, image: Image) -> None:
        self._records.images.put(image)
        self._notes.keep(image)

    def _drop(self, image: ImageId) -> None:
        self._records.images.delete(image)
        self._notes.forget(image)


def _is_same(known: Image, fetched: FetchedImage) -> bool:
    """Whether content fetched under a known id is the known image. It may not be: only the child compares layers with the image's
    config, and hostile layers may have taken the child over. If the id is the disk's digest, the disk alone decides."""
    if known.digest != fetched.digest:
        return False
    return fetched.id.value == fetched.digest.value or (known.tree, known.boot) == (fetched.tree, fetched.boot)


def _separate_id(fetched: FetchedImage) -> ImageId:
    """Another id for content that has a known image's id but is not that image. So it cannot replace the known image, and the
    known image cannot block a correct one."""
    kernels = " ".join(f"{one.path} {one.digest}" for one in fetched.boot)
    content = f"{fetched.id} disk {fetched.digest} files {fetched.tree} boot {kernels}"
    return ImageId(f"sha256:{hashlib.sha256(content.encode()).hexdigest()}")


def _is_of_plain_disk(container: Container) -> bool:
    return container.image_id.value == container.image.value and container.spec.image_config == ImageConfig()


def _without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The names without all spellings of `name`."""
    return tuple(one for one in names if familiar(one) != familiar(name))


def _with(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The names with `name`, which replaces its other spellings."""
    return tuple(sorted((*_without(names, name), name))) if name else names
