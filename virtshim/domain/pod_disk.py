"""The name of a root disk that stays for a pod's life: computed from the pod and the container's name alone. No I/O."""

from __future__ import annotations

import hashlib
import uuid
from typing import Final

from virtshim.domain.sandbox import PodKey

_NAMESPACE: Final = uuid.UUID("6d0a4d6e-0a3f-5b3c-9a55-7669727470ee")


def pod_hash(pod: PodKey) -> str:
    """64 hex digits, the same for all sandboxes of one pod. Names are hashed: a CRI client may send any text."""
    return _digest(f"{pod.namespace}\0{pod.name}\0{pod.uid}")


def disk_name(pod: PodKey, container: str) -> str:
    """`POD/DISK`, the same for all attempts of that container."""
    return f"{pod_hash(pod)}/{_digest(container)}"


def identity(disk: str) -> str:
    """Who the disk of that name is: 20 hex digits."""
    return _digest(disk)[:20]


def vm_uuid(disk: str) -> uuid.UUID:
    """Of all VMs that run on that disk, one after another, where what is kept beside it goes by their UUID."""
    return uuid.uuid5(_NAMESPACE, disk)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
