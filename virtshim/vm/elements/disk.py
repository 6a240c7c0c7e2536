"""Disks and their SCSI controller. Pure.

- `cache='writeback'` is the default and always explicit. The guest's flushes are honoured, so nothing is lost that the guest
  believes safe. The host's page cache holds the shared base image once for all pods. (`none` would bypass the cache, and
  fails at start on file systems without O_DIRECT.)
- `discard='unmap'`: space freed in the guest is freed on the host. Not for read-only disks.
- `error_policy='enospace'`: a full disk on the host pauses the VM, so no write is lost, and the VM resumes when there is
  room. The guest sees every other error, as with a real disk.
- The driver type is always explicit, so that a guest cannot turn its raw disk into a qcow2 that names a host file. So is the
  whole backing chain: if a guest takes over its QEMU, it can write another name into its disk's header, which libvirt would
  follow (see `virtshim/vm/disk_chains.py`).
  - `relabel='no'`: the files already have the right owners (`Disk.path` promises it). Otherwise libvirt would give the
    *shared* base image to QEMU's user at each start, and that user could change it for every other pod. The whole backing
    chain inherits this.
- A block volume as the root disk: its data begins behind a header (`<slices>`), which the guest does not see. It bypasses
  the host's page cache, as other block volumes do (see hostdev.py).
- A seed ISO is a CD-ROM beside SCSI and SATA disks. With virtio-blk, the default, it is a read-only disk instead, so a guest
  needs one driver and probes one bus. cloud-init finds it by the file system's label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement

from virtshim.devices.guest_view import GUEST_VIEW_MAX_BLOCK_DEVICES
from virtshim.model.errors import InvalidRequest
from virtshim.model.hardware import Cache, DiskIo, HardwareOptions
from virtshim.model.image import DiskFormat
from virtshim.model.vm import Backing, Disk, DiskBus
from virtshim.vm.elements import root_bus
from virtshim.vm.elements.text import absolute_path, device_security_label, disk_serial
from virtshim.vm.file_owner import QemuIds
from virtshim.vm.xml_text import parsed
from virtshim.volumes.sysprep import SYSPREP_ANNOTATION

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_PLAIN = HardwareOptions()

# The guest's drivers show serials of 20 bytes for virtio-blk and ATA, and of 36 for QEMU's SCSI disks.
_LONGEST_SERIAL = {DiskBus.SCSI: 36, DiskBus.VIRTIO: 20, DiskBus.SATA: 20}
_PREFIX = {DiskBus.SCSI: "sd", DiskBus.VIRTIO: "vd", DiskBus.SATA: "sd"}
# Port and name of the CD-ROM beside the disks.
_CDROM_PORT, _CDROM_NAME = 5, 26 * 27 - 1  # sdzz

# virtio-blk: the places on the root bus, without those for the host's block devices. SCSI: units of one controller.
# SATA: ports of q35's own controller.
MAX_DISKS = {DiskBus.SCSI: 64, DiskBus.VIRTIO: root_bus.DISKS - GUEST_VIEW_MAX_BLOCK_DEVICES, DiskBus.SATA: 6}


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Limits of each writable disk, per second; 0: none."""

    iops: int = 0
    bandwidth: int = 0


def target_name(prefix: str, index: int) -> str:
    """Counts as Linux does: sda, sdb, ... sdz, sdaa."""
    name = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, len(_LETTERS))
        name = _LETTERS[letter] + name
    return prefix + name


def build(
    disks: Sequence[Disk],
    bus: DiskBus,
    rates: DiskRates = DiskRates(),
    numbers: Sequence[int] = (),
    hardware: HardwareOptions = _PLAIN,
    *,
    gets_images: bool = False,
    owner: QemuIds | None = None,
) -> list[Element]:
    """All `<disk>` elements in order, and the SCSI controller if it is needed. The first disk is the boot disk. `numbers`: the
    place of each disk on its bus; (): in order. `gets_images`: QEMU gets the base images as descriptors (see
    `virtshim/vm/disk_chains.py`). `owner`: whom libvirt gives the host's devices to."""
    if not disks:
        raise InvalidRequest("a VM without a disk has nothing to boot from")
    if len(disks) > MAX_DISKS[bus]:
        raise InvalidRequest(f"{len(disks)} disks are too many: bus {bus.value!r} takes {MAX_DISKS[bus]}")
    numbers = numbers or range(len(disks))
    elements = [
        _disk(one, bus, place, rates, hardware, owner) for place, one in zip(enumerate(numbers), disks, strict=True)
    ]
    if gets_images:
        for index, element in enumerate(elements):
            for source in element.iterfind("backingStore/source"):
                source.set("fdgroup", f"image{index}")
    if bus is DiskBus.SCSI:
        controller = Element("controller", type="scsi", index="0", model="virtio-scsi")
        controller.append(root_bus.own(root_bus.Own.SCSI))
        elements.append(controller)
    return elements


def sata_cdrom(path: str, serial: str, bus: DiskBus, disks: int) -> Element:
    """A CD-ROM on the last port of q35's own controller (AHCI). Its name comes after those of all other disks. `disks`: the
    number of disks on `bus`. Raises InvalidRequest if one of them has that port."""
    if bus is DiskBus.SATA and disks > _CDROM_PORT:
        raise InvalidRequest(
            f"annotation {SYSPREP_ANNOTATION}: {disks} disks on SATA leave no port for the CD-ROM; remove one, or set "
            "VirtletDiskDriver to virtio or scsi"
        )
    element = Element("disk", type="file", device="cdrom")
    SubElement(element, "driver", name="qemu", type=DiskFormat.RAW.value, cache="writeback")
    source = SubElement(element, "source", file=absolute_path(path, "path of a CD-ROM"))
    SubElement(source, "seclabel", model="dac", relabel="no")
    SubElement(element, "backingStore")
    SubElement(element, "target", dev=target_name("sd", _CDROM_NAME), bus="sata")
    SubElement(element, "readonly")
    SubElement(element, "serial").text = disk_serial(serial, _LONGEST_SERIAL[DiskBus.SATA])
    SubElement(element, "address", type="drive", controller="0", bus="0", target="0", unit=str(_CDROM_PORT))
    return element


def qcow2_files_in(definition: str) -> list[Disk]:
    """The qcow2 files in a VM's definition whose backing file it names; without their serials."""
    found = []
    for element in parsed(definition).iterfind("devices/disk[@type='file']"):
        driver, source, below = element.find("driver"), element.find("source"), element.find("backingStore")
        if driver is None or source is None or below is None or driver.get("type") != DiskFormat.QCOW2.value:
            continue
        found.append(Disk(source.get("file", ""), DiskFormat.QCOW2, "", backing=_backing_in(below)))
    return found


def images_in(definition: str) -> list[tuple[str, str]]:
    """The base images that QEMU gets as descriptors: libvirt's name for each, and its path."""
    sources = parsed(definition).iterfind("devices/disk/backingStore/source[@fdgroup]")
    return [(source.get("fdgroup", ""), source.get("file", "")) for source in sources]


def _backing_in(below: Element) -> Backing | None:
    kind, source = below.find("format"), below.find("source")
    if kind is None or source is None:
        return None
    return Backing(source.get("file", ""), DiskFormat(kind.get("type")))


def _backing_store(backing: Backing | None) -> Element:
    """An empty element ends the chain."""
    element = Element("backingStore")
    if backing is not None:
        element.set("type", "file")
        SubElement(element, "format", type=backing.format.value)
        source = SubElement(element, "source", file=absolute_path(backing.path, "path of a backing file"))
        SubElement(source, "seclabel", model="dac", relabel="no")
        SubElement(element, "backingStore")
    return element


def _io_limits(rates: DiskRates) -> Element:
    element = Element("iotune")
    if rates.bandwidth:
        SubElement(element, "total_bytes_sec").text = str(rates.bandwidth)
    if rates.iops:
        SubElement(element, "total_iops_sec").text = str(rates.iops)
    return element


def _source(disk: Disk, owner: QemuIds | None) -> Element:
    path = absolute_path(disk.path, "disk path")
    source = Element("source", {"dev" if disk.is_device else "file": path})
    if not disk.is_device:
        SubElement(source, "seclabel", model="dac", relabel="no")
    elif owner is not None and owner.is_its_own:
        source.append(device_security_label(owner))
    if disk.data_bytes:
        slices = SubElement(source, "slices")
        SubElement(slices, "slice", type="storage", offset=str(disk.data_at), size=str(disk.data_bytes))
    return source


def _disk(
    disk: Disk,
    bus: DiskBus,
    place: tuple[int, int],
    rates: DiskRates,
    hardware: HardwareOptions,
    owner: QemuIds | None,
) -> Element:
    """`place`: its index in the VM, and its number on the bus."""
    index, number = place
    as_cdrom = disk.cdrom and bus is not DiskBus.VIRTIO
    readonly = disk.cdrom or disk.readonly
    element = Element("disk", type="block" if disk.is_device else "file", device="cdrom" if as_cdrom else "disk")
    driver = SubElement(element, "driver", name="qemu", type=disk.format.value)
    if disk.is_device:
        driver.set("cache", "none")
        driver.set("io", "native")
    else:
        driver.set("cache", Cache.WRITEBACK.value if readonly else hardware.cache.value)
        if hardware.io is DiskIo.NATIVE and not readonly:
            driver.set("io", "native")
    if not readonly:
        driver.set("error_policy", "enospace")
        driver.set("rerror_policy", "report")
        driver.set("discard", "unmap")
    element.append(_source(disk, owner))
    element.append(_backing_store(disk.backing))
    SubElement(element, "target", dev=target_name(_PREFIX[bus], number), bus=bus.value)
    if readonly:
        SubElement(element, "readonly")
    elif rates != DiskRates():
        element.append(_io_limits(rates))
    if disk.serial:
        SubElement(element, "serial").text = disk_serial(disk.serial, _LONGEST_SERIAL[bus])
    if index == 0:
        SubElement(element, "boot", order="1")
    if bus is not DiskBus.VIRTIO:
        SubElement(element, "address", type="drive", controller="0", bus="0", target="0", unit=str(number))
    else:
        element.append(root_bus.disk(number))
    return element
