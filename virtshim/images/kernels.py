"""Kernels and initrds from images' /boot, stored by content. Only root may read them, because each VM gets its own copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from virtshim.images.confined.frames import BOOT_PATH, MOST_BOOT_BYTES, MOST_BOOT_FILES, MOST_BOOT_TOTAL
from virtshim.images.disk_writer import DiskWriter
from virtshim.images.trees.store import digests_in
from virtshim.model.errors import InternalError
from virtshim.model.ids import ImageDigest
from virtshim.model.image import BootFile
from virtshim.system.files import sync


class ArrivingBoot:
    """Takes the boot files of one image from the child that unpacks its layers. The child is not trusted, so this class checks
    paths and sizes again and computes the digests. The caller closes the writers."""

    def __init__(self, open_file: Callable[[], DiskWriter]) -> None:
        """`open_file`: opens a new file."""
        self._open_file = open_file
        self._files: dict[str, tuple[DiskWriter, int]] = {}
        self._writer: DiskWriter | None = None
        self._left = 0

    @property
    def is_empty(self) -> bool:
        return not self._files

    def begin(self, path: str, size: str) -> None:
        """Starts a file. Raises ValueError if its path or size is not allowed here."""
        number = int(size) if size.isascii() and size.isdecimal() and len(size) < 20 else 0
        total = number + sum(known for _, known in self._files.values())
        if self._left or path in self._files or not BOOT_PATH.fullmatch(path):
            raise ValueError("a file out of order")
        if not 0 < number <= MOST_BOOT_BYTES or total > MOST_BOOT_TOTAL or len(self._files) >= MOST_BOOT_FILES:
            raise ValueError("a file that is too large, or one too many")
        self._writer, self._left = self._open_file(), number
        self._files[path] = (self._writer, number)

    def takes(self, data: bytes) -> bool:
        """Writes `data` to the current file; false if there is none. Raises ValueError if `data` exceeds the file's size."""
        if self._writer is None or not self._left:
            return False
        if len(data) > self._left:
            raise ValueError("more than the file has")
        self._writer.write(data)
        self._left -= len(data)
        return True

    def finished(self) -> Sequence[tuple[BootFile, Path]]:
        """The boot files and where each is stored, flushed to disk. Raises ValueError if one is incomplete."""
        if self._left:
            raise ValueError("a file is not whole")
        for writer, _ in self._files.values():
            writer.finish()
        return [
            (BootFile(path, writer.digest(), size), writer.path) for path, (writer, size) in sorted(self._files.items())
        ]


class StoredBoot:
    """Implements `virtshim.images.ports.BootFiles`. The directory contains nothing else."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def make_directory(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, digest: ImageDigest) -> str:
        return str(self._directory / digest.hex)

    def take(self, file: Path, digest: ImageDigest) -> None:
        """Stores `file`, which must be flushed to disk, under its digest."""
        file.chmod(0o600)
        file.replace(self.path(digest))
        sync(self._directory)

    def stored(self) -> frozenset[ImageDigest]:
        return digests_in(self._directory)

    def keep_only(self, digests: frozenset[ImageDigest]) -> None:
        try:
            for digest in self.stored() - digests:
                Path(self.path(digest)).unlink(missing_ok=True)
        except OSError as exc:
            raise InternalError(f"{self._directory}: {exc.strerror}; check its disk") from exc
