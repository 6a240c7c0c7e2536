"""UEFI and the TPM. Pure.

libvirt chooses the firmware's files by what their packages say of them (QEMU's firmware descriptors), unless the variables are
older than the VM, and makes a VM's file of variables from the one that belongs to them. It runs swtpm, one a VM, as its own user
for that, which is no VM's.
"""

from __future__ import annotations

from lxml import etree

from virtshim.domain.hardware.options import Firmware, FirmwareFiles
from virtshim.hypervisor.xmltext import absolute_path, printable


def system(kind: Firmware, files: FirmwareFiles | None) -> etree._Element:
    """`<os>`, empty."""
    return etree.Element("os", firmware="efi") if kind.is_uefi and files is None else etree.Element("os")


def describe(os_element: etree._Element, kind: Firmware, files: FirmwareFiles | None, nvram: str) -> None:
    """Which UEFI, and where its variables are; nothing of a BIOS."""
    if not kind.is_uefi:
        return
    secure = "yes" if kind is Firmware.SECURE else "no"
    if files is not None:
        loader = etree.SubElement(os_element, "loader", readonly="yes", secure=secure, type="pflash")
        loader.text = absolute_path(files.code, "firmware")
        variables = etree.SubElement(
            os_element, "nvram", template=absolute_path(files.variables, "firmware's variables")
        )
        variables.text = absolute_path(nvram, "file of UEFI's variables")
        return
    features = etree.SubElement(os_element, "firmware")
    etree.SubElement(features, "feature", name="enrolled-keys", enabled=secure)
    etree.SubElement(features, "feature", name="secure-boot", enabled=secure)
    etree.SubElement(os_element, "nvram").text = absolute_path(nvram, "file of UEFI's variables")


def start_kernel(os_element: etree._Element, kernel: str, initrd: str, arguments: str) -> None:
    """In place of a boot loader; nothing for ""."""
    if not kernel:
        return
    etree.SubElement(os_element, "kernel").text = absolute_path(kernel, "file of the kernel")
    if initrd:
        etree.SubElement(os_element, "initrd").text = absolute_path(initrd, "file of the kernel's RAM disk")
    if arguments:
        etree.SubElement(os_element, "cmdline").text = printable(arguments, "command line of the kernel")


def tpm(*, keeps: bool) -> etree._Element:
    """`keeps`: what it remembers stays when the definition goes."""
    element = etree.Element("tpm", model="tpm-crb")
    backend = etree.SubElement(element, "backend", type="emulator", version="2.0")
    if keeps:
        backend.set("persistent_state", "yes")
    return element
