"""Shortens libvirt's query of the guest's CPU at each start, if libvirt allows it.

At each start libvirt compares the CPU that the guest got with the requested one. By default it queries each of QEMU's
some 400 CPU properties in turn (`qom-get`), which takes longer than the rest of a start. For a domain without the QEMU
capability `cpu-unavailable-features`, it makes three calls for the CPUID words (libvirt 5.5 to 11.5 or so,
qemuProcessFetchGuestCPU), or none (libvirt 12). The short query leaves out MSR features. They matter for the live
definition of named models (`custom`, `host-model`) and for its restore, but not if the definition keeps its mode:
`host-passthrough` and `maximum`.
"""

from __future__ import annotations

from typing import Final
from xml.etree.ElementTree import Element, SubElement

import libvirt

from virtshim.vm.errors import message_of
from virtshim.vm.xml_text import qemu_tag, text_of

# Status files of running domains have this name, so libvirt never removes it from its table.
CAPABILITY: Final = "cpu-unavailable-features"

# libvirt keeps these modes in a running domain's definition, so it needs nothing of QEMU's answer.
_UNCHANGED_MODES: Final = frozenset({"host-passthrough", "maximum"})


def may_be_shortened(cpu: Element) -> bool:
    """Whether libvirt may use the short query for a definition with this `<cpu>`."""
    return cpu.get("mode") in _UNCHANGED_MODES


def shortened() -> Element:
    """The element that shortens the query."""
    capabilities = Element(qemu_tag("capabilities"))
    SubElement(capabilities, qemu_tag("del"), capability=CAPABILITY)
    return capabilities


def refusal(conn: libvirt.virConnect, emulator: str, domain_type: str) -> str:
    """Why this libvirt would not start a definition with the element; "" if it would. libvirt accepts a definition with
    an unknown capability, and only refuses to start it. The check therefore asks libvirt for QEMU's command line, which
    takes a few ms and starts nothing."""
    try:
        conn.domainXMLToNative("qemu-argv", _smallest(emulator, domain_type), 0)
    except libvirt.libvirtError as exc:
        return message_of(exc)
    return ""


def _smallest(emulator: str, domain_type: str) -> str:
    domain = Element("domain", type=domain_type)
    SubElement(domain, "name").text = "virtshim-cpu-query"
    SubElement(domain, "memory", unit="MiB").text = "16"
    os_element = SubElement(domain, "os")
    SubElement(os_element, "type", arch="x86_64", machine="q35").text = "hvm"
    mode = "host-passthrough" if domain_type == "kvm" else "maximum"
    SubElement(domain, "cpu", mode=mode, check="none")
    devices = SubElement(domain, "devices")
    SubElement(devices, "emulator").text = emulator
    SubElement(devices, "controller", type="usb", model="none")
    domain.append(shortened())
    return text_of(domain)
