"""Volumes that only one VM may have at a time, and who has them."""

from __future__ import annotations

from virtshim.domain.container import Container
from virtshim.domain.devices.granted import BlockDevice
from virtshim.domain.sandbox import Sandbox


def anothers(volume: BlockDevice, other: Container, owner: Sandbox | None) -> str:
    """Why `volume` cannot be had; `other` has it, a container of the pod `owner`."""
    pod = f"{owner.key.namespace}/{owner.key.name}" if owner else f"of sandbox {other.sandbox_id}"
    return (
        f"{volume.field_name}: container {other.id} ({other.name.name} of pod {pod}) has the volume {volume.host_path}, "
        "which one virtual machine at a time can have; stop it first, or use another volume"
    )
