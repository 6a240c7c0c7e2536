"""What lies below images' /boot, by content: root's alone, since VMs are given copies of their own."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from virtshim.domain.errors import InternalError
from virtshim.domain.ids import ImageDigest
from virtshim.files import sync

_HEX = re.compile(r"[0-9a-f]{64}")


class StoredBoot:
    """Implements `virtshim.ports.images.BootFiles`. The directory is made by `make_directory`, and has nothing else in it."""

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
