"""What lies below images' /boot, by content: root's alone, since VMs are given copies of their own."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from virtshim.images.confined.frames import BOOT_PATH, MOST_BOOT_BYTES, MOST_BOOT_FILES, MOST_BOOT_TOTAL
from virtshim.images.disk_writer import DiskWriter
from virtshim.model.errors import InternalError
from virtshim.model.ids import ImageDigest
from virtshim.model.image import BootFile
from virtshim.system.files import sync

# What lies below an image's /boot, on its way out of the layers.
#
# The child that unpacks them says what comes; nothing of it is believed: paths and sizes are checked again, the bytes
# digested here.


class ArrivingBoot:
    """One image's. Owns the writers' order, not the writers."""

    def __init__(self, opened: Callable[[], DiskWriter]) -> None:
        """`opened`: a new file."""
        self._opened = opened
        self._files: dict[str, tuple[DiskWriter, int]] = {}
        self._now: DiskWriter | None = None
        self._left = 0

    @property
    def is_empty(self) -> bool:
        return not self._files

    def begin(self, path: str, size: str) -> None:
        """Raises ValueError if it is nothing that may come."""
        number = int(size) if size.isascii() and size.isdecimal() and len(size) < 20 else 0
        total = number + sum(known for _, known in self._files.values())
        if self._left or path in self._files or not BOOT_PATH.fullmatch(path):
            raise ValueError("a file out of order")
        if not 0 < number <= MOST_BOOT_BYTES or total > MOST_BOOT_TOTAL or len(self._files) >= MOST_BOOT_FILES:
            raise ValueError("a file that is too large, or one too many")
        self._now, self._left = self._opened(), number
        self._files[path] = (self._now, number)

    def takes(self, data: bytes) -> bool:
        """Whether these bytes were one's. Raises ValueError if they are only in part."""
        if self._now is None or not self._left:
            return False
        if len(data) > self._left:
            raise ValueError("more than the file has")
        self._now.write(data)
        self._left -= len(data)
        return True

    def finished(self) -> Sequence[tuple[BootFile, Path]]:
        """With the files in which they are, on disk. Raises ValueError if one is not whole."""
        if self._left:
            raise ValueError("a file is not whole")
        for writer, _ in self._files.values():
            writer.finish()
        return [
            (BootFile(path, writer.digest(), size), writer.path) for path, (writer, size) in sorted(self._files.items())
        ]


_HEX = re.compile(r"[0-9a-f]{64}")


class StoredBoot:
    """Implements `virtshim.images.ports.BootFiles`. The directory is made by `make_directory`, and has nothing else in it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def make_directory(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, digest: ImageDigest) -> str:
        return str(self._directory / digest.hex)

    def take(self, file: Path, digest: ImageDigest) -> None:
        """`file`, which is on disk, becomes the one of that digest."""
        file.chmod(0o600)
        file.replace(self.path(digest))
        sync(self._directory)

    def stored(self) -> frozenset[ImageDigest]:
        with contextlib.suppress(FileNotFoundError):
            return frozenset(
                ImageDigest(f"sha256:{name}") for name in os.listdir(self._directory) if _HEX.fullmatch(name)
            )
        return frozenset()

    def keep_only(self, digests: frozenset[ImageDigest]) -> None:
        try:
            for digest in self.stored() - digests:
                Path(self.path(digest)).unlink(missing_ok=True)
        except OSError as exc:
            raise InternalError(f"{self._directory}: {exc.strerror}; look at its disk") from exc
