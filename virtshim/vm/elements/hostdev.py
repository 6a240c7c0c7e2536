"""Devices of the host in the guest: PCI functions, mediated devices, vDPA, USB, block devices. Pure.

Each device on PCI has its own root port. These ports are the first on the root bus, which determines the guest's bus numbers
(see `virtshim.devices.guest_view`). libvirt adds its own ports after them.

A device reaches all of the guest's memory. So QEMU pins that memory at the start, and the VM's cgroup is charged for it. libvirt
raises RLIMIT_MEMLOCK for devices that it knows; vmwrapper only inherits the limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement

from virtshim.devices.guest_view import GUEST_VIEW_MAX_USB_DEVICES, guest_buses, guest_serials
from virtshim.devices.values import (
    BlockDevice,
    MediatedDevice,
    Passthrough,
    PciAddress,
    PciFunction,
    UsbDevice,
    VdpaDevice,
)
from virtshim.model.errors import Unimplemented
from virtshim.vm.elements import root_bus
from virtshim.vm.elements.disk import target_name
from virtshim.vm.elements.text import absolute_path, device_security_label
from virtshim.vm.file_owner import QemuIds
from virtshim.vm.xml_text import parsed

# The prefix of the aliases of devices on PCI. `ua-` is for users: libvirt's own aliases never have it.
ON_PCI = "ua-host-pci"

_PORTS_A_SLOT = 8
_FIRST_SLOT = 1


def root_ports(passthrough: Sequence[Passthrough]) -> list[Element]:
    """The port with index k is for the k-th device on PCI."""
    return [_root_port(bus) for bus, _ in guest_buses(passthrough)]


def fillers(numbers: Sequence[int], passthrough: Sequence[Passthrough]) -> list[Element]:
    """Empty ports for the slots of virtio disks whose first disk is gone: a guest ignores a slot that lacks its first function.
    `numbers`: the numbers of the disks that are left."""
    first = len(guest_buses(passthrough)) + 1
    return [_port(bus, PciAddress(0, 0, slot, 0)) for bus, slot in enumerate(root_bus.headless(numbers), start=first)]


def _root_port(bus: int) -> Element:
    slot, function = divmod(bus - 1, _PORTS_A_SLOT)
    return _port(bus, PciAddress(0, 0, _FIRST_SLOT + slot, function))


def _port(bus: int, place: PciAddress) -> Element:
    element = Element("controller", type="pci", index=str(bus), model="pcie-root-port")
    address = _address(place)
    if place.function == 0:
        address.set("multifunction", "on")
    element.append(address)
    return element


def usb_controller() -> Element:
    element = Element("controller", type="usb", index="0", model="qemu-xhci", ports=str(GUEST_VIEW_MAX_USB_DEVICES))
    element.append(root_bus.own(root_bus.Own.USB))
    return element


def build(passthrough: Sequence[Passthrough]) -> list[Element]:
    """`managed='no'`, because a device plugin or virtshim binds the functions to VFIO and unbinds them."""
    buses = {device: bus for bus, device in guest_buses(passthrough)}
    usb = [device for device in passthrough if isinstance(device, UsbDevice)]
    return [
        *(_on_pci(device, bus) for device, bus in buses.items()),
        *(_usb(device, port) for port, device in enumerate(usb, start=1)),
    ]


def _on_pci(device: Passthrough, bus: int) -> Element:
    element = _source_of(device)
    SubElement(element, "alias", name=f"{ON_PCI}{bus}")
    element.append(_address(PciAddress(0, bus, 0, 0)))
    return element


def _source_of(device: Passthrough) -> Element:
    match device:
        case PciFunction(address=address):
            element = Element("hostdev", mode="subsystem", type="pci", managed="no")
            SubElement(element, "driver", name="vfio")
            source = _address(address)
            del source.attrib["type"]
            SubElement(element, "source").append(source)
            return element
        case MediatedDevice(uuid=uuid):
            element = Element("hostdev", mode="subsystem", type="mdev", model="vfio-pci", managed="no")
            SubElement(SubElement(element, "source"), "address", uuid=uuid)
            return element
        case VdpaDevice(path=path):
            element = Element("interface", type="vdpa")
            SubElement(element, "mac", address=_mac(path))
            SubElement(element, "source", dev=absolute_path(path, "vDPA device"))
            SubElement(element, "model", type="virtio")
            return element
        case UsbDevice():
            element = Element("hostdev", mode="subsystem", type="usb", managed="no")
            place = {"bus": str(device.bus), "device": str(device.device)}
            SubElement(SubElement(element, "source"), "address", place)
            return element


def _usb(device: UsbDevice, port: int) -> Element:
    element = _source_of(device)
    SubElement(element, "alias", name=f"ua-host-usb{port}")
    SubElement(element, "address", type="usb", bus="0", port=str(port))
    return element


def disks(blocks: Sequence[BlockDevice], numbers: Sequence[int], owner: QemuIds | None = None) -> list[Element]:
    """virtio disks at these `numbers`. Block devices bypass the host's page cache: flushed data survives a crash of the node, and
    does not fill the host's memory. Files do not, because their file system may lack O_DIRECT. While QEMU runs, libvirt gives the
    device nodes to QEMU's user, or to the `owner`."""
    return [
        _disk(block, serial, number, owner)
        for block, serial, number in zip(blocks, guest_serials(blocks), numbers, strict=True)
    ]


def files_in(definition: str) -> list[tuple[str, str, bool]]:
    """The files that QEMU gets as descriptors: libvirt's name for each, its path, and whether it is read-only."""
    disks = parsed(definition).iterfind("devices/disk")
    found = [(disk.find("source[@fdgroup]"), disk.find("readonly") is not None) for disk in disks]
    return [
        (source.get("fdgroup", ""), source.get("file", ""), readonly)
        for source, readonly in found
        if source is not None
    ]


def _disk(block: BlockDevice, serial: str, index: int, owner: QemuIds | None) -> Element:
    element = Element("disk", type="file" if block.is_file else "block", device="disk")
    driver = SubElement(element, "driver", name="qemu", type="raw")
    driver.set("cache", "writeback" if block.is_file else "none")
    if not block.is_file:
        driver.set("io", "native")
    if not block.readonly:
        driver.set("error_policy", "enospace")
        driver.set("rerror_policy", "report")
        driver.set("discard", "unmap")
    element.append(_source_of_disk(block, index, owner))
    SubElement(element, "backingStore")
    SubElement(element, "target", dev=target_name("vd", index), bus="virtio")
    if block.readonly:
        SubElement(element, "readonly")
    SubElement(element, "serial").text = serial
    element.append(root_bus.disk(index))
    return element


def _source_of_disk(block: BlockDevice, index: int, owner: QemuIds | None) -> Element:
    """A file keeps its owner, and stays in a directory that QEMU cannot reach."""
    if not block.is_file:
        source = Element("source", dev=absolute_path(block.host_path, "block device"))
        if owner is not None and owner.is_its_own:
            source.append(device_security_label(owner))
        return source
    source = Element("source", file=absolute_path(block.host_path, "disk image"))
    if owner is not None:
        if not owner.gets_images:
            raise Unimplemented(
                f"{block.field_name}: a volume that holds a disk's image needs libvirt 9.0 or newer on this node"
            )
        source.set("fdgroup", f"volume{index}")
    SubElement(source, "seclabel", model="dac", relabel="no")
    return source


def _address(address: PciAddress) -> Element:
    return Element(
        "address",
        type="pci",
        domain=f"{address.domain:#06x}",
        bus=f"{address.bus:#04x}",
        slot=f"{address.slot:#04x}",
        function=f"{address.function:#x}",
    )


def _mac(path: str) -> str:
    """For a vDPA device that has no MAC of its own; the same at each start."""
    digest = hashlib.sha256(path.encode(errors="surrogateescape")).digest()
    return ":".join(f"{byte:02x}" for byte in (0x52, 0x54, 0x00, *digest[:3]))
