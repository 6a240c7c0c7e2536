"""Which PCI functions and USB devices the node itself needs: network cards of its default routes, and disks that are
mounted or swap. Passing one to a VM would take it from the node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from virtshim.devices.host_files import HostFiles
from virtshim.devices.pci import last_address
from virtshim.devices.values import PciAddress

# No stack of bonds, VLANs, device-mapper and RAID devices is this high.
_DEEPEST: Final = 16
_NVME_SUBSYSTEM: Final = re.compile(r"(.*/nvme-subsystem/[^/]+)/")
_NVME_CONTROLLER: Final = re.compile(r"nvme[0-9]+")
# Matches up to the directory of a USB device. Its name lists the ports on the way to it; hubs come before it.
_USB_DEVICE: Final = re.compile(r".*/usb[0-9]+/(?:.*/)?[0-9]+-[0-9.]+(?=/|$)")


def used_by_host(files: HostFiles) -> dict[PciAddress, str]:
    """Function -> what the node uses it for."""
    used: dict[PciAddress, str] = {}
    for path, what in _used(files):
        address = last_address(path)
        if address is not None:
            used.setdefault(address, what)
    return used


def usb_used_by_host(files: HostFiles) -> dict[tuple[int, int], str]:
    """(bus, device) -> what the node uses it for."""
    used: dict[tuple[int, int], str] = {}
    for path, what in _used(files):
        behind = _USB_DEVICE.match(path)
        numbers = [files.text(f"{behind[0]}/{name}") for name in ("busnum", "devnum")] if behind else []
        if numbers and all(map(str.isdecimal, numbers)):
            used.setdefault((int(numbers[0]), int(numbers[1])), what)
    return used


def use_of_block(files: HostFiles, major: int, minor: int) -> str:
    """What the node uses a block device for, "" for nothing. It is used if the device, a partition, or a device stacked
    on it is mounted."""
    own = files.target(f"/sys/dev/block/{major}:{minor}")
    for device, path in _mounted(files) if own else ():
        if any(real == own or real.startswith(f"{own}/") for real in _stack(files, path, _DEEPEST)):
            return f"the node's {device} is on it"
    return ""


def _used(files: HostFiles) -> Iterator[tuple[str, str]]:
    """(path below /sys/devices, use) of the hardware that the node uses."""
    for device, path in _mounted(files):
        yield from ((real, f"the node's {device} is on it") for real in _behind_block(files, path, _DEEPEST))
    for interface in _default_routes(files):
        what = f"the node's default route goes through it ({interface})"
        yield from ((real, what) for real in _behind_interface(files, interface, _DEEPEST))


def _default_routes(files: HostFiles) -> list[str]:
    """Interfaces, from /proc/net/route (name, destination, ..., mask) and ipv6_route (destination, length, ..., name)."""
    found = set()
    for line in files.text("/proc/net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 8 and fields[1] == fields[7] == "00000000":
            found.add(fields[0])
    for line in files.text("/proc/net/ipv6_route").splitlines():
        fields = line.split()
        if len(fields) >= 10 and fields[0] == "0" * 32 and fields[1] == "00":
            found.add(fields[9])
    return sorted(found - {"lo"})


def _behind_interface(files: HostFiles, name: str, depth: int) -> Iterator[str]:
    """Follows bridges, bonds and VLANs down to cards."""
    directory = f"/sys/class/net/{name}"
    real = files.target(f"{directory}/device")
    if real:
        yield real
    for below in files.names(directory) if depth else ():
        if below.startswith("lower_"):
            yield from _behind_interface(files, below.removeprefix("lower_"), depth - 1)


def _mounted(files: HostFiles) -> Iterator[tuple[str, str]]:
    """(mount point or "swap space", path of its block device in sysfs), each device once."""
    seen = set()
    for line in files.text("/proc/self/mountinfo").splitlines():
        fields = line.split()
        if len(fields) < 10 or "-" not in fields[6:]:
            continue
        number, where = fields[2], fields[4]
        source = fields[fields.index("-", 6) + 2] if len(fields) > fields.index("-", 6) + 2 else ""
        # A file system over several devices (btrfs) has a device number with major 0.
        path = _block_class(source) if number.startswith("0:") else f"/sys/dev/block/{number}"
        if path and path not in seen:
            seen.add(path)
            yield f"file system {where}", path
    for line in files.text("/proc/swaps").splitlines()[1:]:
        path = _block_class(line.split()[0])
        if path and path not in seen:
            seen.add(path)
            yield "swap space", path


def _block_class(source: str) -> str:
    name = source.rpartition("/")[2]
    return f"/sys/class/block/{name}" if source.startswith("/dev/") and name else ""


def _behind_block(files: HostFiles, path: str, depth: int) -> Iterator[str]:
    """Follows partitions, device-mapper, RAID and NVMe multipath down to controllers."""
    real = files.target(path)
    if last_address(real) is not None or _USB_DEVICE.match(real):
        yield real
        return
    subsystem = _NVME_SUBSYSTEM.match(f"{real}/")
    if subsystem is not None:
        for name in files.names(subsystem[1]):
            if _NVME_CONTROLLER.fullmatch(name):
                yield files.target(f"{subsystem[1]}/{name}")
    for below in _slaves(files, real) if depth else ():
        yield from _behind_block(files, below, depth - 1)


def _stack(files: HostFiles, path: str, depth: int) -> Iterator[str]:
    """The sysfs directories of the block device and all devices below it."""
    real = files.target(path)
    yield from [real] if real else []
    for below in _slaves(files, real) if depth else ():
        yield from _stack(files, below, depth - 1)


def _slaves(files: HostFiles, real: str) -> Iterator[str]:
    """The devices that it is made of; a partition has those of the whole device."""
    for slaves in (f"{real}/slaves", f"{real.rpartition('/')[0]}/slaves") if real else ():
        for below in files.names(slaves):
            yield f"{slaves}/{below}"
