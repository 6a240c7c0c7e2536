"""Disks and the controller they hang on. Pure.

Choices, each for a reason:

- `cache='writeback'`, unless the pod asks for another, is explicit: the guest's flushes are honoured, so nothing is lost that
  the guest was told is safe, and the shared base image stays in the host's page cache once instead of being read again for every
  pod (`none` would go round it, and fails at start on file systems without O_DIRECT).
- `discard='unmap'`: space freed in the guest is freed on the host. Not for read-only disks.
- `error_policy='enospace'`: a full disk on the host pauses the VM, and no write is lost; it can go on when there is
  room. Every other error is the guest's to see, as with a real disk.
- The driver type is always explicit: a guest must not be able to turn its raw disk into a qcow2 that names a
  host file. So is the whole backing chain, to its end: a QEMU that its guest took over can write another name
  into its disk's header, which libvirt would follow (see chains/unchanged.py).
- `relabel='no'`: the files already belong to whom they must (`Disk.path` promises it). libvirt would otherwise
  give the *shared* base image to the QEMU user on each start, who could then change it for every other pod. The
  whole backing chain inherits it.
- A block volume as the root disk: its data begins behind a header (`<slices>`), which the guest does not see. It goes past
  the host's page cache, as other block volumes do (see hostdev.py).
- A seed ISO is a CD-ROM beside SCSI and SATA disks. With virtio-blk, the default, there is no CD-ROM: it is a read-only
  disk. So a guest needs one driver and probes one bus, and cloud-init goes by the file system's label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lxml import etree

from virtshim.devices.guest_view import GUEST_VIEW_MAX_BLOCK_DEVICES
from virtshim.model.errors import InvalidRequest
from virtshim.model.hardware import Cache, DiskIo, HardwareOptions
from virtshim.model.image import DiskFormat
from virtshim.model.vm import Backing, Disk, DiskBus
from virtshim.vm.elements import root_bus
from virtshim.vm.elements.text import absolute_path, device_security_label, disk_serial
from virtshim.vm.file_owner import QemuIds
from virtshim.volumes.sysprep import SYSPREP_ANNOTATION

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_PLAIN = HardwareOptions()

# What the guest's drivers show: serials of virtio-blk and ATA have 20 bytes, QEMU's SCSI disks take 36.
_LONGEST_SERIAL = {DiskBus.SCSI: 36, DiskBus.VIRTIO: 20, DiskBus.SATA: 20}
_PREFIX = {DiskBus.SCSI: "sd", DiskBus.VIRTIO: "vd", DiskBus.SATA: "sd"}
# Of the CD-ROM beside them: port and name.
_CDROM_PORT, _CDROM_NAME = 5, 26 * 27 - 1  # sdzz

# virtio-blk: what the root bus has room for, beside block devices of the host. SCSI: units of one controller.
# SATA: ports of the controller that q35 has.
MAX_DISKS = {DiskBus.SCSI: 64, DiskBus.VIRTIO: root_bus.DISKS - GUEST_VIEW_MAX_BLOCK_DEVICES, DiskBus.SATA: 6}


@dataclass(frozen=True, slots=True)
class DiskRates:
    """What each writable disk serves at most, a second; 0: as much as it can."""

    iops: int = 0
    bandwidth: int = 0


def target_name(prefix: str, index: int) -> str:
    """sda, sdb, ... sdz, sdaa: as Linux counts."""
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
) -> list[etree._Element]:
    """All `<disk>` elements in order, and the SCSI controller if there is a use for it. The first disk is the
    boot disk. `numbers`: the place of each on its bus; (): in order. `gets_images`: what they are based on comes to QEMU as
    descriptors (see chains/open_images.py). `owner`: whom libvirt gives devices of the host to."""
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
        controller = etree.Element("controller", type="scsi", index="0", model="virtio-scsi")
        controller.append(root_bus.own(root_bus.Own.SCSI))
        elements.append(controller)
    return elements


def sata_cdrom(path: str, serial: str, bus: DiskBus, disks: int) -> etree._Element:
    """On the last port of the controller that each q35 machine has (AHCI); its name is after those of all other disks.
    `disks`: how many there are on `bus`. Raises InvalidRequest if that port is one of theirs."""
    if bus is DiskBus.SATA and disks > _CDROM_PORT:
        raise InvalidRequest(
            f"annotation {SYSPREP_ANNOTATION}: {disks} disks on SATA leave no port for the CD-ROM; take one away, or write "
            "virtio or scsi into VirtletDiskDriver"
        )
    element = etree.Element("disk", type="file", device="cdrom")
    etree.SubElement(element, "driver", name="qemu", type=DiskFormat.RAW.value, cache="writeback")
    source = etree.SubElement(element, "source", file=absolute_path(path, "path of a CD-ROM"))
    etree.SubElement(source, "seclabel", model="dac", relabel="no")
    etree.SubElement(element, "backingStore")
    etree.SubElement(element, "target", dev=target_name("sd", _CDROM_NAME), bus="sata")
    etree.SubElement(element, "readonly")
    etree.SubElement(element, "serial").text = disk_serial(serial, _LONGEST_SERIAL[DiskBus.SATA])
    etree.SubElement(element, "address", type="drive", controller="0", bus="0", target="0", unit=str(_CDROM_PORT))
    return element


def qcow2_files_in(definition: str) -> list[Disk]:
    """The qcow2 files of a VM's definition that name what is below them; their serials are left out."""
    found = []
    for element in etree.fromstring(definition.encode()).iterfind("devices/disk[@type='file']"):
        driver, source, below = element.find("driver"), element.find("source"), element.find("backingStore")
        if driver is None or source is None or below is None or driver.get("type") != DiskFormat.QCOW2.value:
            continue
        found.append(Disk(source.get("file", ""), DiskFormat.QCOW2, "", backing=_backing_in(below)))
    return found


def images_in(definition: str) -> list[tuple[str, str]]:
    """What comes to QEMU as descriptors: the name that libvirt has for each, and its path."""
    sources = etree.fromstring(definition.encode()).iterfind("devices/disk/backingStore/source[@fdgroup]")
    return [(source.get("fdgroup", ""), source.get("file", "")) for source in sources]


def _backing_in(below: etree._Element) -> Backing | None:
    kind, source = below.find("format"), below.find("source")
    if kind is None or source is None:
        return None
    return Backing(source.get("file", ""), DiskFormat(kind.get("type")))


def _backing_store(backing: Backing | None) -> etree._Element:
    """Empty at the end of the chain."""
    element = etree.Element("backingStore")
    if backing is not None:
        element.set("type", "file")
        etree.SubElement(element, "format", type=backing.format.value)
        source = etree.SubElement(
            element, "source", file=absolute_path(backing.path, "path of what a disk is laid over")
        )
        etree.SubElement(source, "seclabel", model="dac", relabel="no")
        etree.SubElement(element, "backingStore")
    return element


def _io_limits(rates: DiskRates) -> etree._Element:
    element = etree.Element("iotune")
    if rates.bandwidth:
        etree.SubElement(element, "total_bytes_sec").text = str(rates.bandwidth)
    if rates.iops:
        etree.SubElement(element, "total_iops_sec").text = str(rates.iops)
    return element


def _source(disk: Disk, owner: QemuIds | None) -> etree._Element:
    path = absolute_path(disk.path, "disk path")
    source = etree.Element("source", {"dev" if disk.is_device else "file": path})
    if not disk.is_device:
        etree.SubElement(source, "seclabel", model="dac", relabel="no")
    elif owner is not None and owner.is_its_own:
        source.append(device_security_label(owner))
    if disk.data_bytes:
        slices = etree.SubElement(source, "slices")
        etree.SubElement(slices, "slice", type="storage", offset=str(disk.data_at), size=str(disk.data_bytes))
    return source


def _disk(
    disk: Disk,
    bus: DiskBus,
    place: tuple[int, int],
    rates: DiskRates,
    hardware: HardwareOptions,
    owner: QemuIds | None,
) -> etree._Element:
    """`place`: the how manieth it is, and its number on the bus."""
    index, number = place
    as_cdrom = disk.cdrom and bus is not DiskBus.VIRTIO
    readonly = disk.cdrom or disk.readonly
    element = etree.Element("disk", type="block" if disk.is_device else "file", device="cdrom" if as_cdrom else "disk")
    driver = etree.SubElement(element, "driver", name="qemu", type=disk.format.value)
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
    etree.SubElement(element, "target", dev=target_name(_PREFIX[bus], number), bus=bus.value)
    if readonly:
        etree.SubElement(element, "readonly")
    elif rates != DiskRates():
        element.append(_io_limits(rates))
    if disk.serial:
        etree.SubElement(element, "serial").text = disk_serial(disk.serial, _LONGEST_SERIAL[bus])
    if index == 0:
        etree.SubElement(element, "boot", order="1")
    if bus is not DiskBus.VIRTIO:
        etree.SubElement(element, "address", type="drive", controller="0", bus="0", target="0", unit=str(number))
    else:
        element.append(root_bus.disk(number))
    return element
