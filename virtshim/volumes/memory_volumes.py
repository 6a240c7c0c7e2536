"""emptyDirs of `medium: Memory` that are a tmpfs in the guest's own memory: the annotation that asks for them. Pure.

Without the annotation such a volume is shared like any other. Its files then outlive the guest and stay for the pod's
life, as Kubernetes promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ANNOTATION: Final = "virtshim.io/memory-volumes"
MOST_MEMORY_VOLUMES: Final = 16


@dataclass(frozen=True, slots=True)
class Tmpfs:
    """The options with which kubelet mounted it on the node."""

    size_bytes: int
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class MemoryVolume:
    """`guest`: its normalized path in the guest. `host`: the directory on the node, which stays empty."""

    guest: str
    host: str
    tmpfs: Tmpfs
    readonly: bool = False

    @property
    def options(self) -> str:
        """Mount options for mount(8)."""
        made = self.tmpfs
        words = [f"size={made.size_bytes}", f"mode={made.mode:o}", f"uid={made.uid}", f"gid={made.gid}", "nosuid,nodev"]
        return ",".join([*words, "ro"] if self.readonly else words)
