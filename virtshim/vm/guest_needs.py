"""What a running guest needs from the QEMU to which it moves, and what the QEMU of a node offers. Pure.

A definition with the mode `host-passthrough` or `maximum` names no CPU features, because the guest has all features of its
node. The guest's CPU is then the CPU model that libvirt reports for this node.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from xml.etree.ElementTree import Element, SubElement

from virtshim.vm.xml_text import parsed, text_of

# libvirt's virQEMUSaveHeader: the magic, the version, the length of the definition that follows, whether the guest ran, the
# compression of QEMU's part, which comes after the definition (0: none), and more.
_HEAD: Final = struct.Struct("=16s5I56x")
_MAGIC: Final = b"LibvirtQemudSave"
_VERSION: Final = re.compile(r"version (\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class GuestCpu:
    """One of libvirt's models. `vendor`: "" for any. `features`: names and policies, where the CPU differs from its model."""

    model: str
    vendor: str = ""
    features: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GuestNeeds:
    """`machine`: the machine type, with its version. `qemu`: the version of the QEMU that the guest runs in; zeros if
    unknown. `cpu`: None if libvirt does not report it. `queues`: of each NIC that vmwrapper made, in order."""

    machine: str
    qemu: tuple[int, int]
    cpu: GuestCpu | None = None
    queues: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QemuHere:
    """`has_machine`: whether this QEMU has the guest's machine type. `lacks_cpu`: which part of the guest's CPU it lacks, in
    libvirt's words; "" for none."""

    qemu: tuple[int, int]
    has_machine: bool = True
    lacks_cpu: str = ""


@dataclass(frozen=True, slots=True)
class SavedMemory:
    """A guest's memory in a file of libvirt. `begins_at`: where in the file QEMU's part begins."""

    definition: str
    needs: GuestNeeds
    memory_bytes: int
    begins_at: int


def machine_of(definition: str) -> str:
    """The machine type of a running VM. Raises ValueError if the definition is not XML."""
    found = parsed(definition).find("os/type")
    return "" if found is None else found.get("machine", "")


def cpu_of(definition: str, capabilities: str) -> GuestCpu | None:
    """The CPU of a running VM. `capabilities`: libvirt's domain capabilities of this node. Raises ValueError if one of the texts
    is not XML."""
    cpu = parsed(definition).find("cpu")
    if cpu is None or not cpu.findtext("model"):
        cpu = parsed(capabilities).find("cpu/mode[@name='host-model'][@supported='yes']")
    if cpu is None or not (model := cpu.findtext("model")):
        return None
    features = {one.get("name", ""): one.get("policy", "require") for one in cpu.iterfind("feature")}
    return GuestCpu(model, cpu.findtext("vendor", ""), features)


def cpu_xml(cpu: GuestCpu) -> str:
    """The CPU in the form that libvirt compares."""
    element = Element("cpu", mode="custom", match="exact")
    SubElement(element, "model", fallback="forbid").text = cpu.model
    if cpu.vendor:
        SubElement(element, "vendor").text = cpu.vendor
    for name, policy in cpu.features.items():
        SubElement(element, "feature", policy=policy, name=name)
    return text_of(element)


def begins_at(head: bytes) -> int:
    """Where QEMU's part begins in a file that libvirt saved, of which `head` is the beginning. Raises ValueError if there is no
    such part, or if it is compressed."""
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise ValueError("it is not a file that libvirt saved")
    _, _, length, _, compression, *_ = _HEAD.unpack(head[: _HEAD.size])
    if compression:
        raise ValueError("it is compressed; remove snapshot_image_format from libvirt's qemu.conf")
    return int(_HEAD.size + length)


def version_in(text: str) -> tuple[int, int]:
    """The first two numbers of the version that `qemu --version` prints. Releases that differ only in the third number can load
    each other's memory. Raises ValueError."""
    if (found := _VERSION.search(text)) is None:
        raise ValueError(f"no version in {text[:80]!r}")
    return int(found[1]), int(found[2])
