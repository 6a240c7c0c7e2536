"""Definitions of templates and of their clones (`virtshim.templates`). Pure.

A template is the machine of a pod without anything of the pod: the same processors, memory and devices at the same addresses,
with nothing but its root disk. A clone loads the template's devices into its own definition, where it has more: a seed, NICs,
volumes. QEMU accepts devices that the template lacks, and the guest finds them when it looks for new devices.
"""

from __future__ import annotations

import posixpath
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from xml.etree.ElementTree import Element, SubElement

from virtshim.model.errors import WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.vm.restored_xml import moved_to
from virtshim.vm.xml_text import parsed, qemu_tag, text_of

# vmwrapper's name for the socket that offers the memory.
_MEMORY: Final = "VIRTSHIM_MEMORY"
# A pod's limits, and the cgroup that has them.
_OF_POD: Final = ("title", "cputune", "memtune", "numatune", "blkiotune", "resource")
# vmwrapper's variables that belong to the pod's network and to one start.
_OF_NETWORK: Final = frozenset(
    {"VIRTSHIM_FETCH_KEY", "VIRTSHIM_TAPMANAGER", "VIRTSHIM_NICS", "VIRTSHIM_NIC_MODEL", _MEMORY}
)
_ROOT: Final = "root"
# In a qcow2's header, the size that the guest sees.
_SIZE_AT: Final = 24


@dataclass(frozen=True, slots=True)
class TemplateNames:
    """What the definition of a template has of its own. `moved`: directories of the container whose machine it is, and the
    template's in their place. `uid`: its QEMU's user, 0 for libvirt's single one."""

    name: str
    uuid: str
    container: ContainerId
    sandbox: SandboxId
    uid: int
    moved: Mapping[str, str]


def why_no_template(own: str) -> str:
    """What of this machine a template cannot have, with the remedy; "" if nothing. `own`: the container's definition."""
    domain = parsed(own)
    for path, why in (
        ("os/loader", "it starts by UEFI, whose variables are not part of a template; use the BIOS"),
        ("devices/tpm", "its TPM has a state of its own; remove virtshim.io/tpm"),
        (
            "devices/filesystem",
            "a volume is shared by virtiofs, which needs memory that the node shares; use a disk or a copy",
        ),
        ("devices/hostdev", "it has a device of the host"),
        ("memoryBacking/hugepages", "its memory is huge pages"),
        ("memoryBacking/source", "a program of the node shares its memory"),
        ("cpu/numa", "its memory is on several NUMA nodes"),
        ("sysinfo", "its SMBIOS or firmware configuration is its own (VirtletSystemUUID, Ignition)"),
        ("os/kernel", "its kernel is started directly; let the disk's boot loader start it"),
    ):
        if domain.find(path) is not None:
            return why
    root = _root_disk(domain)
    if root is None or root.get("type") != "file":
        return "its root disk is a volume"
    if root.find("target[@bus='sata']") is not None:
        return "the guest finds no new SATA disks; remove VirtletDiskDriver, or write virtio or scsi"
    return ""


def template_xml(own: str, names: TemplateNames) -> str:
    """`own`: the definition of a container whose machine the template has."""
    domain = parsed(own)
    for element in domain.iter():
        element.tail = None
        for name, value in element.attrib.items():
            element.set(name, moved_to(value, names.moved))
    _set_text(domain, "name", names.name)
    _set_text(domain, "uuid", names.uuid)
    if (generation := domain.find("genid")) is not None:
        generation.text = None  # libvirt makes one up, so no guest of the template has the template's
    vcpus = domain.find("vcpu")
    if vcpus is not None:
        vcpus.attrib.pop("cpuset", None)
    for name in _OF_POD:
        for element in domain.findall(name):
            domain.remove(element)
    _set_owner(domain, names)
    _set_user(domain, names.uid)
    _without_extras(domain)
    _set_environment(domain, names)
    return text_of(domain)


def on_memory_xml(own: str, socket: str, *, waits: bool) -> str:
    """`own` with the memory that vmwrapper gets from `socket`. `waits`: whether QEMU waits for the state of its devices."""
    domain = parsed(own)
    commandline = _commandline(domain)
    if waits:
        for value in ("-incoming", "defer"):
            SubElement(commandline, qemu_tag("arg"), value=value)
    # libvirt wants all variables behind the arguments or before them, in any order.
    SubElement(commandline, qemu_tag("env"), name=_MEMORY, value=socket)
    return text_of(domain)


def memory_bytes_in(own: str) -> int:
    return int(parsed(own).findtext("memory", "0")) << 10


def virtual_size(head: bytes) -> int:
    """Bytes that the guest sees of a qcow2 file with this beginning."""
    return int(struct.unpack_from(">Q", head, _SIZE_AT)[0])


def _without_extras(domain: Element) -> None:
    devices = domain.find("devices")
    assert devices is not None, "every definition has devices"
    root = _root_disk(domain)
    for disk in devices.findall("disk"):
        if disk is not root:
            devices.remove(disk)


def _set_environment(domain: Element, names: TemplateNames) -> None:
    for variable in list(_variables(domain)):
        name = variable.get("name", "")
        if name in _OF_NETWORK:
            _commandline(domain).remove(variable)
        elif name == "VIRTSHIM_SANDBOX":
            variable.set("value", names.sandbox.value)
        elif name == "VIRTSHIM_OUTPUT":  # a pipe beside those of other VMs
            variable.set("value", posixpath.join(posixpath.dirname(variable.get("value", "")), names.name))


def _root_disk(domain: Element) -> Element | None:
    return next((disk for disk in domain.iterfind("devices/disk") if disk.findtext("serial") == _ROOT), None)


def _set_text(domain: Element, name: str, text: str) -> None:
    element = domain.find(name)
    assert element is not None, f"every definition has <{name}>"
    element.text = text


def _set_owner(domain: Element, names: TemplateNames) -> None:
    """The mark of this node, and of no pod."""
    metadata = domain.find("metadata")
    assert metadata is not None, "every definition has <metadata>"
    for element in list(metadata):
        if element.tag.endswith("}owner"):
            element.set("container", names.container.value)
            element.set("sandbox", names.sandbox.value)
        else:
            metadata.remove(element)


def _set_user(domain: Element, uid: int) -> None:
    label = domain.find("seclabel[@type='static'][@model='dac']/label")
    if label is None or not label.text:
        return
    before, _, group = label.text.partition(":")
    for one in domain.iter("label"):  # of devices, too
        if one.text and one is not label:
            one.text = one.text.replace(before, f"+{uid}")
    label.text = f"+{uid}:{group}"


def _commandline(domain: Element) -> Element:
    found = domain.find(qemu_tag("commandline"))
    if found is None:
        raise WrongState("the definition has no arguments for vmwrapper")
    return found


def _variables(domain: Element) -> Iterator[Element]:
    return _commandline(domain).iterfind(qemu_tag("env"))
