"""Templates of guests that have booted: by which key one is found, and which of them the node keeps. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from virtshim.metrics.observed import WarmStart
from virtshim.model.container import Container
from virtshim.vm.warm_xml import TemplateNames, template_xml


@dataclass(frozen=True, slots=True)
class Template:
    """A guest that has booted. Descriptors of files without names: `memory`, which nobody can write to any more; `devices`, the
    state of its devices; `disk`, its root disk as it was at that moment. `bytes`: what all of it takes. `booted_in`: seconds
    until its guest agent answered."""

    memory: int
    devices: int
    disk: int
    bytes: int
    booted_in: float = 0.0


@dataclass(frozen=True, slots=True)
class Kept:
    """`used_at`: when a guest last started from it, on the monotonic clock. `image`: as a pod has named it."""

    key: str
    bytes: int
    used_at: float
    image: str = ""


@dataclass(frozen=True, slots=True)
class Cold:
    """Why a guest boots although its pod has virtshim.io/warm-start: for counters, and for people, with the remedy."""

    how: WarmStart
    why: str


def why_cold(container: Container) -> str:
    """Why a container's guest cannot come from a template, by its record, with the remedy; "" if it may."""
    spec = container.spec
    if spec.vm or spec.pod_disk:
        return "its root disk outlives the container; remove virtshim.io/vm and virtshim.io/root-disk"
    if spec.granted.root_volume is not None:
        return "its root disk is a volume"
    if spec.granted.passthrough:
        return "it has devices of the host"
    return ""


def key_of(definition: str, nobody: TemplateNames, disk_bytes: int, qemu: str) -> str:
    """Containers with equal keys have equal machines, on equal disks: the definition names the image below the root disk.
    `definition`: the container's. `nobody`: names that are the same for all containers. `disk_bytes`: the size that the guest
    sees. `qemu`: tells QEMUs apart."""
    machine = template_xml(definition, nobody)
    return hashlib.sha256("\0".join((machine, str(disk_bytes), qemu)).encode()).hexdigest()


def to_drop(kept: Sequence[Kept], wanted: int, most: int) -> tuple[str, ...] | None:
    """Which templates must go, so that the others and `wanted` more bytes fit into `most`: those that were not used for the
    longest time. None if `wanted` alone is more."""
    if wanted > most:
        return None
    gone: list[str] = []
    taken = sum(one.bytes for one in kept)
    for one in sorted(kept, key=lambda one: one.used_at):
        if taken + wanted <= most:
            break
        gone.append(one.key)
        taken -= one.bytes
    return tuple(gone)
