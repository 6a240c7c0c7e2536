"""Makes the domain definition of a VM that continues after a save, or after a move from another node. Pure: equal texts give
equal bytes.

libvirt compares the new definition with the saved one. What the guest sees must be the same: machine type, CPU,
memory, addresses, ports that were plugged in. So these elements come from the saved definition. What belongs to the
container comes from the container's own definition: the owner mark, the limits, the user, the disks' files, vmwrapper's
environment. Paths of the earlier container are replaced by the paths of the new container.

A definition from another node is not trusted, because somebody may have taken over that node. Such a definition must not make
this node open files or devices, or run a QEMU that is not confined. So it must have exactly the elements of the container's own
definition, at the same places. Only elements that nobody but the guest sees may differ.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final
from xml.etree.ElementTree import Element, SubElement

from virtshim.model.errors import WrongState
from virtshim.model.text import escaped
from virtshim.vm.xml_text import parsed, qemu_tag, text_of

# Elements of the domain that the container's own definition replaces.
_OWN: Final = ("metadata", "title", "cputune", "memtune", "numatune", "blkiotune", "resource", "seclabel")
# A new element goes before the first of these that exists, because libvirt expects this order.
_BEHIND: Final = ("memory", "os", "features", "cpu", "clock", "devices")
# Variables in vmwrapper's environment that describe the guest's NICs.
_OF_GUEST: Final = frozenset({"VIRTSHIM_NICS", "VIRTSHIM_NIC_MODEL"})
# Paths of programs and firmware, which may differ between nodes.
_OF_NODE: Final = ("devices/emulator", "os/loader")
# QEMU's arguments to wait for the memory of an arriving guest. They apply only to this start.
_INCOMING: Final = ("-incoming", "defer")
# Elements that only the guest sees: addresses of devices, CPU and memory, what was plugged in while the guest ran.
_OF_GUEST_ALONE: Final = frozenset((
    "address", "alias", "controller", "cpu", "currentMemory", "feature", "memory", "model", "target", "topology", "type", "vcpu",
    "vcpus", "vendor",
))  # fmt: skip
# The socket of a port that was plugged in. Other names are refused, because libvirt removes any file that has the name.
_PLUGGED: Final = re.compile(r"exec-[0-9]{1,3}\.sock")
# Elements that libvirt omits from a definition for another node. libvirt on that node adds them again.
_IMPLICIT: Final = frozenset({"audio", "input"})
# Elements that say how a disk may be used.
_RIGHTS: Final = ("readonly", "shareable", "transient")


def restored_xml(saved: str, own: str, moved: Mapping[str, str]) -> str:
    """`saved`: the definition in the saved state. `own`: the container's definition. `moved`: for each directory of the saved
    container, the directory that this container has instead. Raises WrongState if the two definitions cannot be of one VM."""
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
    """The definition of a VM whose memory is about to arrive. `theirs`: the VM's definition on the other node. `own`, `moved`: as
    for `restored_xml`. Raises WrongState if the two definitions cannot be of one VM."""
    result, mine = _parsed(restored_xml(theirs, own, moved)), _parsed(own)
    for place in _OF_NODE:
        for element, here in zip(result.iterfind(place), mine.iterfind(place), strict=False):
            element.text = here.text
    _refuse_foreign(result, mine)
    commandline = result.find("{*}commandline")
    if commandline is not None:
        for value in _INCOMING:
            SubElement(commandline, qemu_tag("arg"), value=value)
    return text_of(result)


def _refuse_foreign(result: Element, mine: Element) -> None:
    if result.get("type") != mine.get("type"):
        raise _foreign(f"the type {result.get('type')}")
    sockets = _sockets(mine)
    has, own = Counter(_features(result)), Counter(_features(mine))
    lacks = [one for one in own - has if one[0][-1] not in _IMPLICIT]
    for path, attributes, text in [*(has - own), *lacks]:
        if not _is_of_guest(path[-1], dict(attributes), text, sockets):
            raise _foreign(f"<{path[-1]}> {' '.join((*(value for _, value in attributes), text))}")
    rights = {_target(disk): _rights(disk) for disk in mine.iterfind("devices/disk")}
    for disk in result.iterfind("devices/disk"):
        if _rights(disk) != rights[_target(disk)]:
            raise _foreign(f"other rights to the disk {_target(disk)}")


_Feature = tuple[tuple[str, ...], frozenset[tuple[str, str]], str]


def _features(element: Element, above: tuple[str, ...] = ()) -> Iterator[_Feature]:
    """Each element with its path. The order of elements does not matter."""
    path = (*above, element.tag)
    yield path, frozenset(element.attrib.items()), element.text or ""
    for child in element:
        yield from _features(child, path)


def _rights(disk: Element) -> list[str]:
    return [name for name in _RIGHTS if disk.find(name) is not None]


def _sockets(mine: Element) -> str:
    """The directory of the container's sockets. It also has the sockets of ports that were plugged in."""
    paths = [element.get("path", "") for element in mine.iterfind("devices/channel/source")]
    return paths[0].rpartition("/")[0] if paths else ""


def _is_of_guest(tag: str, attributes: Mapping[str, str], text: str, sockets: str) -> bool:
    match tag:
        case "domain":
            return attributes.keys() <= {"id", "type"}
        case "channel":
            return attributes == {"type": "unix"}
        case "source":
            path = attributes.get("path", "")
            directory, _, name = path.rpartition("/")
            is_port = directory == sockets and _PLUGGED.fullmatch(name) is not None
            return attributes == {"mode": "bind", "path": path} and is_port
        case tag if tag.endswith("}env"):
            return attributes.get("name") in _OF_GUEST
        case tag:
            return tag in _OF_GUEST_ALONE and not any("/" in value for value in (*attributes.values(), text))


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
    for element in root.iter():  # remove the white space that indents elements
        element.tail = None
        if len(element):
            element.text = None
    return root


def _move(root: Element, moved: Mapping[str, str]) -> None:
    for element in root.iter():
        for name, value in element.attrib.items():
            element.set(name, moved_to(value, moved))
        if element.text and not len(element):
            element.text = moved_to(element.text, moved)


def moved_to(value: str, moved: Mapping[str, str]) -> str:
    """The path after the move of the directory that contains it."""
    for before, now in moved.items():
        if value == before or value.startswith(f"{before}/"):
            return now + value[len(before) :]
    return value


def _refuse_larger(saved: Element, own: Element) -> None:
    """Refuses a guest that has more memory than the pod's limits allow, because the kernel would kill such a guest."""
    has, may = (memory_kib(one) for one in (saved, own))
    if has > may:
        raise WrongState(
            f"the saved guest has {has >> 10} MiB of memory, and the pod has {may >> 10} MiB; raise the pod's memory limit, or "
            "let the VM boot"
        )


def memory_kib(root: Element) -> int:
    """The memory that the guest of this definition has now. Raises WrongState."""
    found = root.find("currentMemory")
    found = root.find("memory") if found is None else found
    text = "" if found is None else found.text or ""
    if found is None or found.get("unit", "KiB") != "KiB" or not re.fullmatch("[0-9]{1,15}", text):
        raise WrongState("the saved definition has no size of its memory in KiB")
    return int(text)


def _replace_all(result: Element, mine: Element, name: str) -> None:
    for element in result.findall(name):
        result.remove(element)
    at = next((index for index, element in enumerate(result) if element.tag in _BEHIND), 0)
    if name == "seclabel":
        at = len(result)
    for offset, element in enumerate(mine.findall(name)):
        result.insert(at + offset, copy.deepcopy(element))


def _replace_disks(result: Element, mine: Element) -> None:
    """The files come from the container's definition, because they may belong to another user. Disks are matched by their target,
    by which the guest knows them."""
    own = {_target(disk): disk for disk in mine.iterfind("devices/disk")}
    saved = {_target(disk): disk for disk in result.iterfind("devices/disk")}
    if own.keys() != saved.keys():
        missing = sorted(own.keys() ^ saved.keys())
        raise WrongState(
            f"the disks of the saved VM are not those of the pod: only one of the two has {', '.join(missing)}"
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
