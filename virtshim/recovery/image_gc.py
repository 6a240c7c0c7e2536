"""Removes unused images when their file system fills up, on nodes where kubelet does not do it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.images.service import ImageService, stored_images
from virtshim.metrics import observed
from virtshim.model.errors import InvalidRequest
from virtshim.model.ids import ImageId
from virtshim.model.image import UNKNOWN_IMAGE, Image, Watermarks
from virtshim.store.ports import StateRecords
from virtshim.system.clock import Clock
from virtshim.system.live import Live
from virtshim.system.rate_limits import TroubleLog

log = structlog.get_logger(__name__)

_NEVER: Final = 100
# Nanoseconds. An image that was pulled this recently is about to be used by a pod.
_YOUNG: Final = 300 * 10**9


@dataclass(slots=True)
class ImageGc:
    """Remembers in this process when images were last used; before that, the time of the pull counts."""

    images: ImageService
    records: StateRecords
    clock: Clock
    watermarks: Live[Watermarks]
    _used_at: dict[ImageId, int] = field(default_factory=dict)
    _trouble: TroubleLog = field(default_factory=lambda: TroubleLog(log, over="image_gc.enough"))

    def look(self) -> None:
        """Called every few minutes on one thread. Raises the image store's errors."""
        now, unused = self.clock.now_ns(), self._unused()
        limits, space = self.watermarks.now, self.images.files.filesystem_usage().space
        if limits.high >= _NEVER or space.used_percent < limits.high:
            self._trouble.over()
            return
        wanted, freed, removed = space.over(limits.low), 0, 0
        for image in sorted(unused, key=lambda one: self._used_at[one.id]):
            if freed >= wanted:
                break
            if now - self._used_at[image.id] >= _YOUNG:
                bytes_ = self.images.remove(image.id.value, unless=self._stays)
                freed, removed = freed + bytes_, removed + bool(bytes_)
        if removed:
            log.info("image_gc.removed", images=removed, bytes=freed, wanted=wanted, used_percent=space.used_percent)
            observed.meter().tell(observed.ImagesRemoved(removed))
        if freed < wanted:
            self._trouble.met(
                "image_gc.not_enough",
                used_percent=space.used_percent,
                missing_bytes=wanted - freed,
                remedy="free space on the file system of paths.state_dir; no image that could be removed is left",
            )
        else:
            self._trouble.over()

    def _unused(self) -> list[Image]:
        """Returns the unused images, and notes that the others are in use now."""
        now, is_used, unused = self.clock.now_ns(), self._used(), []
        before, self._used_at = self._used_at, {}
        for image in self.images.all():
            if is_used(image):
                self._used_at[image.id] = now
            else:
                unused.append(image)
                self._used_at[image.id] = max(before.get(image.id, 0), image.pulled_at)
        return unused

    def _stays(self, image: Image) -> bool:
        """Checks again before a removal, because something may have changed since the look. Nobody changes images
        meanwhile."""
        return self.clock.now_ns() - image.pulled_at < _YOUNG or self._used()(image)

    def _used(self) -> Callable[[Image], bool]:
        """Whether an image is pinned, or needed by a container, a pod's disk, a volume or a running pull. While a
        record does not tell its image, any image may be needed."""
        containers = self.records.containers.all()
        files = {digest for container in containers for digest in stored_images(container)}
        kept = self.images.under_kept_disks()
        files |= kept or set()
        ids = {container.image_id for container in containers} | self._pulled_now()
        unknown = (
            kept is None or bool(self.records.unreadable()) or any(one.image == UNKNOWN_IMAGE for one in containers)
        )

        def is_used(image: Image) -> bool:
            needed = image.id in ids or not files.isdisjoint((image.digest, image.tree))
            return unknown or image.pinned or needed

        return is_used

    def _pulled_now(self) -> set[ImageId]:
        found = set()
        for reference in self.images.pulling():
            with contextlib.suppress(InvalidRequest):
                if image := self.images.find(reference):
                    found.add(image.id)
        return found
