"""The file systems in a guest, as its agent tells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GuestFilesystem:
    """One that is mounted. `device` is the guest's name for what it lies on; sizes are 0 where an agent does not tell them."""

    mount_point: str
    kind: str
    device: str
    used_bytes: int = 0
    total_bytes: int = 0
