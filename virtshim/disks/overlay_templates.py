"""Overlays as qemu-img made them, kept in memory: the next one over the same base, of the same size, is a copy.

A new overlay holds nothing but a header, empty tables, and its base's path: some hundred bytes in 200 KiB of zeros. qemu-img
takes 10 ms to make one, half of it waiting for the disk. Nothing of this is on disk, so nothing of it can be stale, half-made or
left behind: the first overlay after a start of virtshim is qemu-img's again.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from virtshim.domain.image import DiskFormat

_BLOCK = 4096
# A node has few images, and a pod's size of its disk is seldom its own alone; one takes 1 KiB.
_MOST = 256


@dataclass(frozen=True, slots=True)
class OverlayKey:
    """All that one new overlay differs in from another."""

    base_path: str
    base_format: DiskFormat
    size: int


@dataclass(frozen=True, slots=True)
class _Template:
    """A file's length, and its blocks that are not all zeros: (offset, bytes)."""

    length: int
    blocks: tuple[tuple[int, bytes], ...]


class OverlayTemplates:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[OverlayKey, _Template] = {}

    def learn(self, key: OverlayKey, path: str) -> None:
        """`path` is such an overlay, and nobody has used it yet. Raises OSError."""
        with open(path, "rb") as file:
            content = file.read()
        blocks = ((offset, content[offset : offset + _BLOCK]) for offset in range(0, len(content), _BLOCK))
        template = _Template(len(content), tuple((offset, block) for offset, block in blocks if any(block)))
        with self._lock:
            if len(self._kept) >= _MOST:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = template

    def copy(self, key: OverlayKey, path: str) -> bool:
        """Makes the overlay `path`, which must not be there; False if no such overlay is known. A power cut may take it: its VM
        ends then, too. Raises OSError, with a part of it made."""
        with self._lock:
            template = self._kept.get(key)
        if template is None:
            return False
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, template.length)
            for offset, block in template.blocks:
                os.pwrite(descriptor, block, offset)
        finally:
            os.close(descriptor)
        return True
