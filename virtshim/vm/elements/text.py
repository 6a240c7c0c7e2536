"""Text that domain XML may contain, and the security labels that say which user QEMU runs as. Pure.

The label is for libvirt's DAC driver. QEMU runs as that user, and while the VM runs, that user owns what libvirt gives the
VM: its directories, device nodes and huge pages. The user has no name, so its only group is the label's. All QEMUs share
that group, which /dev/kvm and tapmanager's socket belong to. Other security drivers label the VM by themselves.
"""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement

from virtshim.model.errors import InvalidRequest
from virtshim.model.layout import LONGEST_SOCKET_PATH
from virtshim.vm.file_owner import QemuIds
from virtshim.vm.xml_text import parsed

# XML 1.0 "Char", without line breaks: libvirt refuses them in titles, and names and paths need none.
_NOT_ALLOWED = re.compile("[^\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
_SERIAL = re.compile(r"[A-Za-z0-9_.+ -]*")


def printable(value: str, what: str) -> str:
    """Returns `value`, if it is one line that XML can carry."""
    if found := _NOT_ALLOWED.search(value):
        raise InvalidRequest(
            f"{what} {value[:80]!r} contains U+{ord(found.group()):04X}, which is not allowed in a VM definition:"
            " remove control characters"
        )
    return value


def domain_name(value: str) -> str:
    """Returns `value`, if it suits libvirt, file names and shells."""
    if not _NAME.fullmatch(value):
        raise InvalidRequest(
            f"not a VM name: {value[:80]!r} (1 to 200 of A-Z a-z 0-9 . _ + -, starting with a letter or a digit)"
        )
    return value


def disk_serial(value: str, longest: int) -> str:
    """A serial number that reaches the guest whole."""
    if not _SERIAL.fullmatch(value) or len(value) > longest:
        raise InvalidRequest(
            f"not a disk serial for this bus: {value[:80]!r} (at most {longest} of A-Z a-z 0-9 _ . + - wanted)"
        )
    return value


def absolute_path(value: str, what: str) -> str:
    if not value.startswith("/"):
        raise InvalidRequest(f"{what} {value[:200]!r} is not an absolute path")
    return printable(value, what)


def socket_path(value: str, what: str) -> str:
    """An absolute path that fits into a socket address."""
    if len(value.encode("utf-8", "surrogateescape")) > LONGEST_SOCKET_PATH:
        raise InvalidRequest(
            f"{what} {value!r} is longer than the {LONGEST_SOCKET_PATH} bytes of a Unix socket address:"
            " choose a shorter run_dir"
        )
    return absolute_path(value, what)


def vm_security_label(qemu: QemuIds) -> Element:
    element = Element("seclabel", type="static", model="dac", relabel="yes")
    SubElement(element, "label").text = f"+{qemu.uid}:+{qemu.gid}"
    return element


def device_security_label(qemu: QemuIds) -> Element:
    """For device nodes, which give their group access: the label's group has no members."""
    element = Element("seclabel", model="dac", relabel="yes")
    SubElement(element, "label").text = f"+{qemu.uid}:+{qemu.uid}"
    return element


def security_models_in(capabilities: str) -> list[str]:
    """Which of `apparmor` and `selinux` libvirt's capabilities list. libvirt adds their labels to definitions by itself
    (sVirt)."""
    models = [element.text for element in parsed(capabilities).iterfind("host/secmodel/model")]
    return [model for model in models if model in ("apparmor", "selinux")]


def vm_uid_in(definition: str) -> int:
    """The VM's own user; 0 if it has none, or if the definition cannot be read."""
    label = parsed(definition).findtext("seclabel[@type='static'][@model='dac']/label", "")
    uid = label.partition(":")[0].removeprefix("+")
    return int(uid) if uid.isdecimal() else 0
