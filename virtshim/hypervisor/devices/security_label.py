"""Who a VM's QEMU is on the node, in its definition. Pure.

A label of libvirt's DAC driver: QEMU runs as that user, and what libvirt gives the VM (its directories, device nodes, huge pages)
is that user's while the VM runs. The user has no name, so its only group is the label's: the one that all QEMUs have, which
/dev/kvm and tapmanager's socket belong to. No other driver is named: those label the VM by themselves.
"""

from __future__ import annotations

from lxml import etree

from virtshim.hypervisor.file_owner import QemuIds


def of_vm(qemu: QemuIds) -> etree._Element:
    element = etree.Element("seclabel", type="static", model="dac", relabel="yes")
    etree.SubElement(element, "label").text = f"+{qemu.uid}:+{qemu.gid}"
    return element


def of_device(qemu: QemuIds) -> etree._Element:
    """For one whose node lets its group in: that group is nobody's."""
    element = etree.Element("seclabel", model="dac", relabel="yes")
    etree.SubElement(element, "label").text = f"+{qemu.uid}:+{qemu.uid}"
    return element


def labelled_by(capabilities: str) -> list[str]:
    """What libvirt labels VMs for by itself (sVirt): of `apparmor` and `selinux` those in its capabilities. A definition that
    says nothing of one gets a label of it."""
    models = [element.text for element in etree.fromstring(capabilities.encode()).iterfind("host/secmodel/model")]
    return [model for model in models if model in ("apparmor", "selinux")]


def uid_in(definition: str) -> int:
    """The VM's own user; 0 if it has none, or that cannot be read."""
    label = etree.fromstring(definition.encode()).findtext("seclabel[@type='static'][@model='dac']/label", "")
    uid = label.partition(":")[0].removeprefix("+")
    return int(uid) if uid.isdecimal() else 0
