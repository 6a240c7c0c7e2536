"""Drivers of USB devices of the host: QEMU takes interfaces from them, and gives them back when it ends, unless it is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator

from tapmanager.errors import TapmanagerError, internal, invalid
from tapmanager.kernel_files import names_in, value_in, write_once

# Which driver a PCI function of the host has: read and changed by sysfs. Here because virtshim's unit may not write
# below /sys.
#
# `driver_override`, not `new_id`: it speaks of one function. A driver's new_id takes every function of that kind that
# has no driver, and does so until the module is unloaded.

VFIO = "vfio-pci"

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", re.ASCII)
_DRIVER = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
# PCI class codes, upper 16 bits: host bridges and PCI-to-PCI bridges carry other devices.
_BRIDGES = ("0x0600", "0x0604")


class PciDrivers:
    """`sysfs`: where it is mounted. `write`: (path, text), one write(2), for sysfs takes a value whole; raises OSError.
    `is_open`: whether somebody has that IOMMU group's node open."""

    def __init__(
        self,
        sysfs: str = "/sys",
        write: Callable[[str, str], None] | None = None,
        is_open: Callable[[str], bool] | None = None,
    ) -> None:
        self._bus = os.path.join(sysfs, "bus/pci")
        self._write_once = write or write_once
        self._is_open = is_open or _is_open

    def driver(self, address: str) -> str:
        """Its driver's name, "" if it has none. Raises TapmanagerError."""
        try:
            return os.path.basename(os.readlink(os.path.join(self._device(address), "driver")))
        except FileNotFoundError:
            return ""

    def bind(self, address: str, driver: str) -> None:
        """From now on the function has that driver; "" for none. Nothing changes if it has it. Raises TapmanagerError."""
        if driver and not _DRIVER.fullmatch(driver):
            raise invalid(f"not the name of a driver: {driver[:80]!r}")
        device = self._device(address)
        self._refuse_bridge(device, address)
        if driver == VFIO and not os.path.isdir(self._driver_directory(VFIO)):
            raise TapmanagerError(
                "failed-precondition",
                f"PCI device {address} cannot be given to {VFIO}: the kernel has no such driver loaded (modprobe {VFIO}, and a "
                "file below /etc/modules-load.d for the next boot)",
            )
        now = self.driver(address)
        if driver not in (VFIO, now):
            self._refuse_in_use(device, address)
        # Only vfio-pci is forced upon a function; every other driver finds its own by itself.
        self._write(os.path.join(device, "driver_override"), VFIO if driver == VFIO else "\n")
        if now == driver:
            return
        if now:
            self._write(os.path.join(device, "driver/unbind"), address)
        if not driver:
            return
        self._write(os.path.join(self._bus, "drivers_probe"), address)
        if (now := self.driver(address)) not in ("", driver):  # another one was quicker
            self._write(os.path.join(device, "driver/unbind"), address)
            now = ""
        if not now:
            with contextlib.suppress(TapmanagerError):  # told below
                self._write(os.path.join(self._driver_directory(driver), "bind"), address)
        if (now := self.driver(address)) != driver:
            what = f"PCI device {address} has {now or 'no driver'} instead of {driver}"
            raise internal(f"{what}, which refused it; the kernel's log says why")

    def reset(self, address: str) -> bool:
        """False if it has no way to be reset. Raises TapmanagerError if the reset failed."""
        path = os.path.join(self._device(address), "reset")
        if not os.path.exists(path):
            return False
        self._refuse_in_use(self._device(address), address)
        self._write(path, "1")
        return True

    def _device(self, address: str) -> str:
        if not _ADDRESS.fullmatch(address):
            raise invalid(f"not a PCI address: {address[:80]!r}")
        path = os.path.join(self._bus, "devices", address)
        if not os.path.exists(path):
            raise TapmanagerError("not-found", f"there is no PCI device {address} on this node")
        return path

    def _driver_directory(self, driver: str) -> str:
        return os.path.join(self._bus, "drivers", driver)

    def _refuse_bridge(self, device: str, address: str) -> None:
        with open(os.path.join(device, "class"), encoding="ascii") as file:
            if file.read().startswith(_BRIDGES):
                raise invalid(f"PCI device {address} is a bridge: what is behind it would lose its driver")

    def _refuse_in_use(self, device: str, address: str) -> None:
        """Whatever the asker believes: the kernel would wait for the VM's end before it takes a function from vfio-pci, and a
        driver of the host's beside a VM in one group reaches the VM's memory (older kernels stop there)."""
        with contextlib.suppress(FileNotFoundError):  # no IOMMU
            group = os.path.basename(os.readlink(os.path.join(device, "iommu_group")))
            if self._is_open(f"/dev/vfio/{group}"):
                raise TapmanagerError(
                    "failed-precondition",
                    f"PCI device {address} is in use: a virtual machine has its IOMMU group {group} open. It is free when that "
                    "has ended",
                )

    def _write(self, path: str, text: str) -> None:
        try:
            self._write_once(path, text)
        except OSError as exc:
            raise internal(f"{path} cannot be written: {exc.strerror}") from exc


def _is_open(node: str) -> bool:
    """VFIO lets a group be opened once."""
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        return exc.errno == errno.EBUSY
    return False


class UsbDrivers:
    """`sysfs`: where it is mounted. `write`: as of `PciDrivers`."""

    def __init__(self, sysfs: str = "/sys", write: Callable[[str, str], None] = write_once) -> None:
        self._bus = os.path.join(sysfs, "bus/usb")
        self._write = write

    def probe(self, bus: int, device: int) -> list[str]:
        """As if it had just been plugged in: each of its interfaces without a driver gets the one that wants it. Which got
        one. Raises TapmanagerError."""
        found = []
        for interface in self._interfaces(self._name(bus, device)):
            link = os.path.join(self._bus, "devices", interface, "driver")
            if os.path.islink(link):
                continue
            path = os.path.join(self._bus, "drivers_probe")
            try:
                self._write(path, interface)
            except OSError as exc:
                raise internal(f"{path} does not take {interface}: {exc.strerror}") from exc
            if os.path.islink(link):
                found.append(interface)
        return found

    def _name(self, bus: int, device: int) -> str:
        """In sysfs, by the ports on the way to it."""
        for name in self._names():
            if self._number(name, "busnum") == bus and self._number(name, "devnum") == device:
                return name
        raise TapmanagerError("not-found", f"there is no USB device {bus:03}/{device:03} on this node")

    def _names(self) -> list[str]:
        """Of devices and interfaces."""
        return names_in(os.path.join(self._bus, "devices"))  # none where the kernel has no USB

    def _number(self, name: str, attribute: str) -> int:
        """0, which is none's, for an interface and for what has just gone."""
        value = value_in(os.path.join(self._bus, "devices", name, attribute))
        return int(value) if value.isdecimal() else 0

    def _interfaces(self, name: str) -> Iterator[str]:
        """`1-4:1.0`: the device's name, then configuration and number."""
        return (other for other in self._names() if other.startswith(f"{name}:"))
