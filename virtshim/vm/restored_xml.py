"""The definition that a saved VM, or one from another node, continues with. Pure: equal texts give equal bytes.

libvirt compares it with the saved one: what the guest sees must be the same (machine type, CPU, memory, addresses, ports that
were plugged in), so that comes from the saved definition. What belongs to the container comes from its own definition: the
owner mark, the limits, the user, the disks' files, vmwrapper's environment. Paths of the earlier container become those of
this one.

The definition of another node is not trusted: a taken-over node must not get its peers to open files or devices. So nothing may
be in it that the container's own definition does not have, except what only the guest sees.
"""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Mapping
from typing import Final
from xml.etree.ElementTree import Element, SubElement

from virtshim.model.errors import WrongState
from virtshim.model.text import escaped
from virtshim.vm.xml_text import QEMU_NAMESPACE, parsed, text_of

# Elements of the domain that the container's own definition replaces.
_OWN: Final = ("metadata", "title", "cputune", "memtune", "numatune", "blkiotune", "resource", "seclabel")
# Where libvirt expects a new element: before the first of these that is there.
_BEHIND: Final = ("memory", "os", "features", "cpu", "clock", "devices")
# What the guest's NICs look like. vmwrapper is told by its environment.
_OF_GUEST: Final = frozenset({"VIRTSHIM_NICS", "VIRTSHIM_NIC_MODEL"})
# Programs and firmware, where each node has its own.
_OF_NODE: Final = ("devices/emulator", "os/loader")
# How QEMU waits for a guest's memory; not for its next start.
_INCOMING: Final = ("-incoming", "defer")
# What only the guest sees: where its devices are, how it is built, what was plugged into it while it ran.
_OF_GUEST_ALONE: Final = frozenset(
    (
        "address",
        "alias",
        "controller",
        "currentMemory",
        "feature",
        "memory",
        "model",
        "target",
        "topology",
        "type",
        "vcpu",
        "vcpus",
    )
)


def restored_xml(saved: str, own: str, moved: Mapping[str, str]) -> str:
    """`saved`: the definition in the saved state. `own`: the container's. `moved`: directories of the container that was
    saved, and those that this container has in their place. Raises WrongState if the two cannot be one VM."""
    result, mine = _parsed(saved), _parsed(own)
    for name in ("name", "uuid"):
        if result.findtext(name) != mine.findtext(name):
            raise WrongState(f"the saved state is that of VM {result.findtext('name')}, not {mine.findtext('name')}")
    _refuse_larger(result, mine)
    _move(result, moved)
    for name in _OWN:
        _replace_all(result, mine, name)
    _replace_disks(result, mine)
    _replace_environment(result, mine)
    return text_of(result)


def arriving_xml(theirs: str, own: str, moved: Mapping[str, str]) -> str:
    """The definition of a VM whose memory is about to arrive. `theirs`: the one that it has on the other node. Raises WrongState
    if the two cannot be one VM."""
    result, mine = _parsed(restored_xml(theirs, own, moved)), _parsed(own)
    for place in _OF_NODE:
        for element, here in zip(result.iterfind(place), mine.iterfind(place), strict=False):
            element.text = here.text
    _refuse_foreign(result, mine, tuple(moved.values()))
    commandline = result.find("{*}commandline")
    if commandline is not None:
        for value in _INCOMING:
            SubElement(commandline, f"{{{QEMU_NAMESPACE}}}arg", value=value)
    return text_of(result)


def _refuse_foreign(result: Element, mine: Element, directories: tuple[str, ...]) -> None:
    """`directories`: those of the container's own files, where ports that were plugged in have their sockets."""
    if result.get("type") != mine.get("type"):
        raise _foreign(f"the type {result.get('type')}")
    own = {_features(element) for element in mine.iter()}
    for element in result.iter():
        if _features(element) not in own and not _is_of_guest(element, directories):
            raise _foreign(f"<{element.tag}> {' '.join((*element.attrib.values(), element.text or ''))}")
    for kind in {element.tag for element in mine.iterfind("devices/*")} - {"controller", "channel"}:
        if len(result.findall(f"devices/{kind}")) > len(mine.findall(f"devices/{kind}")):
            raise _foreign(f"more devices <{kind}>")


def _features(element: Element) -> tuple[str, frozenset[tuple[str, str]], str]:
    return element.tag, frozenset(element.attrib.items()), element.text or ""


def _is_of_guest(element: Element, directories: tuple[str, ...]) -> bool:
    values = [*element.attrib.values(), element.text or ""]
    match element.tag:
        case "domain":
            return set(element.keys()) <= {"id", "type"}
        case "channel":
            return element.attrib == {"type": "unix"}
        case "source":
            path = element.get("path", "")
            return element.attrib == {"mode": "bind", "path": path} and _is_below(path, directories)
        case tag if tag.endswith("}env"):
            return element.get("name") in _OF_GUEST
        case tag:
            return tag in _OF_GUEST_ALONE and not any("/" in value for value in values)


def _is_below(path: str, directories: tuple[str, ...]) -> bool:
    return posixpath.normpath(path) == path and any(path.startswith(f"{one}/") for one in directories)


def _foreign(what: str) -> WrongState:
    return WrongState(
        f"the virtual machine's definition on the other node has {escaped(what, 200)}, which its pod on this node does not have; "
        "give both pods the same volumes, devices and annotations"
    )


def _parsed(text: str) -> Element:
    try:
        root = parsed(text)
    except ValueError as exc:
        raise WrongState(f"the saved definition cannot be read: {exc}") from exc
    for element in root.iter():  # the texts between elements, which only indent them
        element.tail = None
        if len(element):
            element.text = None
    return root


def _move(root: Element, moved: Mapping[str, str]) -> None:
    for element in root.iter():
        for name, value in element.attrib.items():
            element.set(name, _moved(value, moved))
        if element.text and not len(element):
            element.text = _moved(element.text, moved)


def _moved(value: str, moved: Mapping[str, str]) -> str:
    for before, now in moved.items():
        if value == before or value.startswith(f"{before}/"):
            return now + value[len(before) :]
    return value


def _refuse_larger(saved: Element, own: Element) -> None:
    """The pod's limits would end a guest that has more memory than they allow."""
    has, may = (int(one.findtext("currentMemory") or one.findtext("memory") or 0) for one in (saved, own))
    if has > may:
        raise WrongState(
            f"the saved guest has {has >> 10} MiB of memory, and the pod has {may >> 10} MiB; raise the pod's memory limit, or "
            "let the VM boot"
        )


def _replace_all(result: Element, mine: Element, name: str) -> None:
    for element in result.findall(name):
        result.remove(element)
    at = next(index for index, element in enumerate(result) if element.tag in _BEHIND)
    if name == "seclabel":
        at = len(result)
    for offset, element in enumerate(mine.findall(name)):
        result.insert(at + offset, copy.deepcopy(element))


def _replace_disks(result: Element, mine: Element) -> None:
    """The files are the container's: they may have another user. The guest knows a disk by its target."""
    own = {_target(disk): disk for disk in mine.iterfind("devices/disk")}
    saved = {_target(disk): disk for disk in result.iterfind("devices/disk")}
    if own.keys() != saved.keys():
        missing = sorted(own.keys() ^ saved.keys())
        raise WrongState(
            f"the disks of the saved VM are not those of the pod: {', '.join(missing)} is in one of them alone"
        )
    for target, disk in saved.items():
        for name in ("source", "backingStore", "driver"):
            for element in disk.findall(name):
                disk.remove(element)
            for element in reversed(own[target].findall(name)):
                disk.insert(0, copy.deepcopy(element))


def _target(disk: Element) -> str:
    target = disk.find("target")
    return "" if target is None else target.get("dev", "")


def _replace_environment(result: Element, mine: Element) -> None:
    saved, own = result.find("{*}commandline"), mine.find("{*}commandline")
    if saved is None or own is None:
        return
    seen = {element.get("name"): element for element in saved.iterfind("{*}env")}
    for element in seen.values():
        saved.remove(element)
    for element in saved.findall("{*}arg"):
        saved.remove(element)
    wanted = [element for element in own.iterfind("{*}env") if element.get("name") not in _OF_GUEST]
    wanted += [element for name, element in seen.items() if name in _OF_GUEST]
    for element in wanted:
        saved.append(copy.deepcopy(element))
