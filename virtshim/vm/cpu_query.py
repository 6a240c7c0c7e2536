"""Whether libvirt can be spared asking QEMU for each property of the guest's CPU at every start.

At each start libvirt compares the CPU that the guest got with the one that was asked for. By default it asks for each of QEMU's
some 400 CPU properties in turn (`qom-get`), which takes longer than all else of a start. A domain without the QEMU capability
`cpu-unavailable-features` is asked in three calls for the CPUID words instead (libvirt 5.5 to 11.5 or so,
qemuProcessFetchGuestCPU), or not at all (libvirt 12). What is left out, MSR features, counts for the live definition
of named models (`custom`, `host-model`) and for their restore, and for nothing where the definition keeps its mode:
`host-passthrough` and `maximum`."""

from __future__ import annotations

from typing import Final

import libvirt
from lxml import etree

from virtshim.vm.errors import message_of

QEMU_NAMESPACE: Final = "http://libvirt.org/schemas/domain/qemu/1.0"

# The name is in the status files of running domains, so libvirt never takes it out of its table.
CAPABILITY: Final = "cpu-unavailable-features"

# libvirt keeps these modes as they are in a running domain's definition, so nothing is read from what QEMU would say.
_UNCHANGED_MODES: Final = frozenset({"host-passthrough", "maximum"})


def may_be_shortened(cpu: etree._Element) -> bool:
    """For a definition's `<cpu>`."""
    return cpu.get("mode") in _UNCHANGED_MODES


def shortened() -> etree._Element:
    """The element of a definition that has the query shortened."""
    capabilities = etree.Element(f"{{{QEMU_NAMESPACE}}}capabilities", nsmap={"qemu": QEMU_NAMESPACE})
    etree.SubElement(capabilities, f"{{{QEMU_NAMESPACE}}}del", capability=CAPABILITY)
    return capabilities


def refusal(conn: libvirt.virConnect, emulator: str, domain_type: str) -> str:
    """Why this libvirt would not start a definition with it; "" if it would. A definition with a capability that libvirt does not
    know is taken, and refused at its start; so libvirt is asked for QEMU's command line, which takes a few ms and
    starts nothing."""
    try:
        conn.domainXMLToNative("qemu-argv", _smallest(emulator, domain_type), 0)
    except libvirt.libvirtError as exc:
        return message_of(exc)
    return ""


def _smallest(emulator: str, domain_type: str) -> str:
    domain = etree.Element("domain", type=domain_type, nsmap={"qemu": QEMU_NAMESPACE})
    etree.SubElement(domain, "name").text = "virtshim-cpu-query"
    etree.SubElement(domain, "memory", unit="MiB").text = "16"
    os_element = etree.SubElement(domain, "os")
    etree.SubElement(os_element, "type", arch="x86_64", machine="q35").text = "hvm"
    mode = "host-passthrough" if domain_type == "kvm" else "maximum"
    etree.SubElement(domain, "cpu", mode=mode, check="none")
    devices = etree.SubElement(domain, "devices")
    etree.SubElement(devices, "emulator").text = emulator
    etree.SubElement(devices, "controller", type="usb", model="none")
    domain.append(shortened())
    return etree.tostring(domain, encoding="unicode")
