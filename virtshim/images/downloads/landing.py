"""Where one pull puts what it downloads."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from virtshim.domain.errors import InternalError
from virtshim.domain.ids import ImageDigest
from virtshim.images.disk_writer import DiskWriter
from virtshim.images.downloads.partials import Partials
from virtshim.images.downloads.room import Room, Share
from virtshim.images.downloads.turns import Turns
from virtshim.images.pull_cache import StoredDiskLookup
from virtshim.images.trees.writer import TreeWriter
from virtshim.removal import remove_tree


@dataclass(frozen=True, slots=True)
class Ground:
    """What all pulls share: files in the making lie in `incoming`, `stored` finds the disks that are complete."""

    incoming: Path
    partials: Partials
    turns: Turns
    room: Room
    stored: StoredDiskLookup


class Landing:
    """One pull's. A context manager: behind it nobody waits for this pull any more, and what it wrote is gone unless it was moved
    away, or can be gone on with."""

    def __init__(self, ground: Ground, name: str, max_bytes: int) -> None:
        self._ground = ground
        self._name = name
        self._max_bytes = max_bytes
        self._held = contextlib.ExitStack()
        self._room = Share(ground.room)
        self._disk: DiskWriter | None = None
        self.files: TreeWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.__exit__(kind, error, trace)

    def claim(self, identity: str, waiting: Callable[[], None], source: str = "") -> ImageDigest | None:
        """The stored disk that this identity stands for; None: it is now this pull's to download. Another pull that downloads it
        from the same source already is waited for: `waiting` is called meanwhile. Nobody waits for another source, which may send
        a byte now and then."""
        if (stored := self._ground.stored(identity)) is not None:
            return stored
        self._held.enter_context(self._ground.turns.taken(f"{source} {identity}", waiting))
        return self._ground.stored(identity)

    def disk(self, identity: str = "") -> DiskWriter:
        """The disk's file, open to be written. One with an identity may have some bytes already."""
        path = self._held.enter_context(self._ground.partials.taken(identity)) if identity else None
        if path is None:
            path = self._ground.incoming / secrets.token_hex(16)
            self._held.callback(path.unlink, missing_ok=True)
        self._disk = self._held.enter_context(DiskWriter(path, self._name, self._max_bytes, self._room))
        return self._disk

    def beside(self) -> DiskWriter:
        """A file for what comes with the disk, open to be written."""
        path = self._ground.incoming / secrets.token_hex(16)
        self._held.callback(path.unlink, missing_ok=True)
        return self._held.enter_context(DiskWriter(path, self._name, self._max_bytes, self._room))

    def tree(self) -> TreeWriter:
        """Where its files go."""
        name = secrets.token_hex(16)
        self._held.callback(remove_tree, str(self._ground.incoming), name)
        self.files = TreeWriter(self._ground.incoming / name, self._name, self._max_bytes, self._room)
        return self._held.enter_context(self.files)

    def finished(self) -> tuple[ImageDigest, Path]:
        """The disk is complete: its digest, and its file, which is on disk when this returns."""
        if self._disk is None:
            raise InternalError(f"image {self._name!r}: its source brought no disk; pull it again")
        self._disk.finish()
        return self._disk.digest(), self._disk.path

    def part(self, identity: str, size: int) -> Path | None:
        """A file for bytes that are on their way to become the disk; None if there is none to be had."""
        return self._held.enter_context(self._ground.partials.taken(identity, size))
