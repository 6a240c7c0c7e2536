"""Images: pull, status, list, remove; and which of them containers still need."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import structlog

from virtshim.images.ports import FetchedImage, ImageNotes
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

# What of the image store stays for a container. No I/O.


def stored_images(container: Container) -> tuple[ImageDigest, ...]:
    """As long as its record is there: the disk, and the files of its volumes."""
    return (container.image, *(volume.image.tree for volume in container.spec.volumes if volume.image is not None))


log = structlog.get_logger(__name__)

# A RemoveImage may take the file between its download and its record: the pull then starts over, this often.
_ATTEMPTS = 3


class ImageService:
    """The image table. One lock orders what changes it; downloads run outside that lock."""

    def __init__(
        self,
        records: StateRecords,
        files: KnownImageFiles,
        notes: ImageNotes,
        clock: Clock,
        pinned: Live[Sequence[str]] | None = None,
    ) -> None:
        """`pinned`: names of images that are listed as such."""
        self._records = records
        self.files = files
        self._notes = notes
        self._clock = clock
        self._pinned = pinned or Live(())
        self._lock = threading.RLock()
        self.pulling: Counter[str] = Counter()
        """The references of pulls under way; whoever holds the lock may read them."""

    def pull(self, reference: str, credentials: Credentials | None, cancelled: threading.Event) -> Image:
        """Always contacts the source. The image is listed when this returns."""
        meter, began = observed.meter(), time.monotonic()
        meter.pulls_under_way(1)
        result, size = observed.OK, 0
        try:
            with observed.tracer().part("pull"), self._under_way(reference):
                image = self._pull(reference, credentials, cancelled)
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
            self.pulling[reference] += 1
        try:
            yield
        finally:
            with self._lock:
                self.pulling -= Counter((reference,))

    def _pull(self, reference: str, credentials: Credentials | None, cancelled: threading.Event) -> Image:
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(Aborted):  # the file that was there already went while its source was asked
                fetched = self.files.fetch(reference, credentials, cancelled)
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
        """A name names one image, however it is spelt: it is taken from the one that had it before, when the new one has it."""
        old = self._records.images.get(fetched.id)
        if old is not None and not _is_same(old, fetched):
            self._refuse_anothers_id(fetched)
            if old.id.value != old.digest.value:
                fetched = dataclasses.replace(fetched, id=_id_of_its_own(fetched))
                old = self._records.images.get(fetched.id)
        replaced: set[ImageDigest | None] = {old.digest, old.tree} if old else set()
        if old is not None and old.digest != fetched.digest:  # a file that is this image's config
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
            tree=fetched.tree or (old.tree if old else None),  # a source that brings the disk alone takes nothing away
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
        """With what it takes now. What other images have, too, is each one's."""
        boot = {one.digest: one.size for one in image.boot}
        files = [digest for digest in (image.digest, image.tree) if digest is not None]
        return dataclasses.replace(image, taken=self.files.filesystem_usage(*files).used_bytes + sum(boot.values()))

    def _refuse_anothers_id(self, fetched: FetchedImage) -> None:
        """A file whose bytes are an image's config, published as a disk, never stands for that image."""
        if fetched.id.value == fetched.digest.value:
            raise InvalidRequest(
                f"the file {fetched.digest} is the configuration of an image on this node, not a disk; publish the disk"
            )

    def _take_names(self, other: Image, fetched: FetchedImage) -> None:
        """An image that nothing names any more goes, too: one of an earlier version, which knew it by its disk."""
        tags, repo_digests = _without(other.tags, fetched.tag), _without(other.repo_digests, fetched.repo_digest)
        if (tags, repo_digests) == (other.tags, other.repo_digests):
            return
        if tags or repo_digests:
            self._put(dataclasses.replace(other, tags=tags, repo_digests=repo_digests))
        else:
            self._drop(other.id)
            self._collect(other.digest, other.tree)

    def find(self, reference: str) -> Image | None:
        """By id, unique id prefix, tag or digest; None if it is not here."""
        return find_image(self.all(), reference)

    def all(self) -> Sequence[Image]:
        images = self._records.images.all()
        named = [find_named(images, name) for name in self._pinned.now]
        pinned = {image.id for image in named if image is not None}
        return [dataclasses.replace(image, pinned=True) if image.id in pinned else image for image in images]

    @contextlib.contextmanager
    def pinned(self, reference: str, volumes: Sequence[SharedVolume] = ()) -> Iterator[Image]:
        """The image cannot be removed inside the block, nor the files of `volumes`; write a container record in it, which keeps
        them afterwards. Raises NotFound, InvalidRequest for an image that is no VM's."""
        with self._lock:
            image = self.find(reference)
            if image is None:
                raise NotFound(f"image {reference[:300]!r} is not on this node; pull it first")
            if not image.has_disk:
                raise InvalidRequest(
                    f"image {reference[:300]!r} is not a VM image: it has no file below /disk, and can be a volume only; build a "
                    "containerDisk (FROM scratch, ADD disk.qcow2 /disk/), or say where its disk is (images.disk_paths)"
                )
            for volume in volumes:
                if volume.image is not None and volume.image.tree not in self.files.stored():
                    raise Aborted(f"image {volume.image.id} was removed while its container was created; pull it again")
            yield image

    def remove(self, reference: str, unless: Callable[[Image], bool] = lambda _: False) -> int:
        """With all its names. No error if it is not here. The file stays while another image or a container uses it. Gives the
        bytes that are free now, 0 if it stays. `unless`: asked when nobody else changes images; true keeps it."""
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
        """Deletes the file, or the files, if neither an image record, nor a container, nor a pod's disk needs it."""
        with self._lock:
            if self._may_be_needed():
                return
            if any(digest in (image.digest, image.tree) for image in self._records.images.all()):
                return
            if any(digest in stored_images(container) for container in self._records.containers.all()):
                return
            if any(digest in sandbox.root_disks.values() for sandbox in self._records.sandboxes.all()):
                return
            self.files.delete(digest)

    def _collect_boot(self) -> None:
        """Of kernels those alone stay that an image has: VMs have copies."""
        if not self._records.unreadable():
            self.files.boot.keep_only(
                frozenset(one.digest for image in self._records.images.all() for one in image.boot)
            )

    def _with_stored_files(self, image: Image) -> Image:
        return image if image.tree in self.files.stored() else dataclasses.replace(image, tree=None)

    def _may_be_needed(self) -> bool:
        """As long as there is a record that does not tell its image, no file goes."""
        unknown = any(container.image == UNKNOWN_IMAGE for container in self._records.containers.all())
        return unknown or bool(self._records.unreadable())

    def adopt(self) -> None:
        """After the state database was lost: images whose disks are here are as their notes say. Other files get records as plain
        disks. Their names are what containers called them by; others are listed by their digest. A name of an OCI image is not
        given to its bare disk, which would run without the image's user and entrypoint: the next pull lists it again, and finds
        the disk here."""
        with self._lock:
            for image in self._notes.all():
                self._adopt(image)
            known = {digest for image in self._records.images.all() for digest in (image.digest, image.tree)}
            for digest in sorted(self.files.stored() - known):
                try:
                    found = self.files.describe(digest)
                except ShimError as exc:
                    log.warning("image.unadopted", digest=str(digest), error=str(exc))
                    continue
                if found.tree is not None:  # nobody knows which image's files they are
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
        """If its disk is here. What lies under a digest was checked when it was put there."""
        if noted.digest not in self.files.stored() or self._records.images.get(noted.id) is not None:
            return
        try:
            found = self.files.describe(noted.digest)
        except ShimError as exc:
            log.warning("image.unadopted", digest=str(noted.digest), error=str(exc))
            return
        kernels = {one.digest for one in noted.boot} <= self.files.boot.stored()
        if (found.size, found.format) == (noted.size, noted.format) and kernels:
            self._put(self._with_stored_files(noted))
            log.warning("image.adopted", digest=str(noted.digest), tags=noted.tags)

    def unneeded(self) -> frozenset[ImageDigest]:
        """Files that no record accounts for."""
        needed = {digest for image in self._records.images.all() for digest in (image.digest, image.tree)}
        needed |= {digest for one in self._records.containers.all() for digest in stored_images(one)}
        needed |= {digest for sandbox in self._records.sandboxes.all() for digest in sandbox.root_disks.values()}
        return self.files.stored() - needed

    def collect_all(self) -> None:
        """At start: files that nothing needs, and records whose file is gone."""
        self.files.sweep()
        with self._lock:
            stored, boot = self.files.stored(), self.files.boot.stored()
            for image in self._records.images.all():
                if image.digest not in stored or not {one.digest for one in image.boot} <= boot:
                    log.warning("image.file.missing", id=str(image.id), digest=str(image.digest))
                    self._drop(image.id)
                    continue
                now = self._counted(self._with_stored_files(image))  # an earlier version did not count
                if now != image:
                    self._put(now)
            for digest in stored:
                self.collect(digest)
            self._collect_boot()
            self._note_all()

    def _note_all(self) -> None:
        """Those of earlier versions, too. Nothing is forgotten while a record cannot be read: it may be that one's."""
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
    """Only the child that unpacks layers compares them with their image's config. Layers may have taken it over, and a known id
    may come with another image's content. A disk that is known by its own digest cannot: it may bring files, or none."""
    if known.digest != fetched.digest:
        return False
    return fetched.id.value == fetched.digest.value or (known.tree, known.boot) == (fetched.tree, fetched.boot)


def _id_of_its_own(fetched: FetchedImage) -> ImageId:
    """Of what came with the id of a known image and is not that image. It replaces nothing, and nobody is kept from his own."""
    kernels = " ".join(f"{one.path} {one.digest}" for one in fetched.boot)
    content = f"{fetched.id} disk {fetched.digest} files {fetched.tree} boot {kernels}"
    return ImageId(f"sha256:{hashlib.sha256(content.encode()).hexdigest()}")


def _is_of_plain_disk(container: Container) -> bool:
    return container.image_id.value == container.image.value and container.spec.image_config == ImageConfig()


def _without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Without every spelling of that name."""
    return tuple(one for one in names if familiar(one) != familiar(name))


def _with(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Of several spellings the last one is listed."""
    return tuple(sorted((*_without(names, name), name))) if name else names
