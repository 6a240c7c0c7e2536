"""Drivers of the host's PCI and USB devices, read and changed through sysfs. virtshim's own unit may not write below /sys."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator

from tapmanager.errors import TapmanagerError, internal, invalid, wrong_state
from tapmanager.kernel_files import names_in, value_in, write_once

# PCI functions. Uses `driver_override`, which affects one function. `new_id` would make the driver take every function of that
# kind without a driver, until the module is unloaded.

VFIO = "vfio-pci"

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", re.ASCII)
_DRIVER = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
# PCI class codes, upper 16 bits: host bridges and PCI-to-PCI bridges carry other devices.
_BRIDGES = ("0x0600", "0x0604")


class PciDrivers:
    """`sysfs`: its mount point. `write`: writes (path, text) with one write(2), because sysfs takes a value as a whole; raises
    OSError. `is_open`: whether a process has the IOMMU group's device node open."""

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
        """The name of the function's driver; "" if it has none. Raises TapmanagerError."""
        try:
            return os.path.basename(os.readlink(os.path.join(self._device(address), "driver")))
        except FileNotFoundError:
            return ""

    def bind(self, address: str, driver: str) -> None:
        """Binds the function to the driver, or to none for "". Does nothing if that is so already. Raises TapmanagerError."""
        if driver and not _DRIVER.fullmatch(driver):
            raise invalid(f"not the name of a driver: {driver[:80]!r}")
        device = self._device(address)
        self._refuse_bridge(device, address)
        if driver == VFIO and not os.path.isdir(self._driver_directory(VFIO)):
            raise wrong_state(
                f"PCI device {address} cannot be bound to {VFIO}, because the driver is not loaded; run modprobe {VFIO}, and add "
                "a file below /etc/modules-load.d for the next boot"
            )
        now = self.driver(address)
        if driver not in (VFIO, now):
            self._refuse_in_use(device, address)
        # Only vfio-pci needs an override; other drivers match their functions by themselves.
        self._write(os.path.join(device, "driver_override"), VFIO if driver == VFIO else "\n")
        if now == driver:
            return
        if now:
            self._write(os.path.join(device, "driver/unbind"), address)
        if not driver:
            return
        self._write(os.path.join(self._bus, "drivers_probe"), address)
        if (now := self.driver(address)) not in ("", driver):  # another driver was faster
            self._write(os.path.join(device, "driver/unbind"), address)
            now = ""
        if not now:
            with contextlib.suppress(TapmanagerError):  # reported below
                self._write(os.path.join(self._driver_directory(driver), "bind"), address)
        if (now := self.driver(address)) != driver:
            what = f"PCI device {address} has {now or 'no driver'} instead of {driver}"
            raise internal(f"{what}, which refused the device; see the kernel's log")

    def reset(self, address: str) -> bool:
        """Resets the function. Returns False if it does not support a reset. Raises TapmanagerError if the reset failed."""
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
                raise invalid(f"PCI device {address} is a bridge: devices behind it would lose their drivers")

    def _refuse_in_use(self, device: str, address: str) -> None:
        """Refuses a function of a VM, for two reasons. The kernel waits for the VM's end before it unbinds vfio-pci. A
        host driver in the IOMMU group of a VM can reach the VM's memory; older kernels crash then."""
        with contextlib.suppress(FileNotFoundError):  # no IOMMU
            group = os.path.basename(os.readlink(os.path.join(device, "iommu_group")))
            if self._is_open(f"/dev/vfio/{group}"):
                raise wrong_state(
                    f"PCI device {address} is in use: a virtual machine has its IOMMU group {group} open. The "
                    "device is free when that virtual machine has ended"
                )

    def _write(self, path: str, text: str) -> None:
        try:
            self._write_once(path, text)
        except OSError as exc:
            raise internal(f"{path} cannot be written: {exc.strerror}") from exc


def _is_open(node: str) -> bool:
    """Whether the group is open: VFIO allows only one open at a time."""
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        return exc.errno == errno.EBUSY
    return False


class UsbDrivers:
    """QEMU takes the interfaces of a USB device from their drivers. It returns them when it ends, unless it is killed; then
    `probe` does. `sysfs`, `write`: as for `PciDrivers`."""

    def __init__(self, sysfs: str = "/sys", write: Callable[[str, str], None] = write_once) -> None:
        self._bus = os.path.join(sysfs, "bus/usb")
        self._write = write

    def probe(self, bus: int, device: int) -> list[str]:
        """Binds each interface without a driver to the driver that matches it, as if the device had just been plugged in. Returns
        the interfaces that got a driver. Raises TapmanagerError."""
        found = []
        for interface in self._interfaces(self._name(bus, device)):
            link = os.path.join(self._bus, "devices", interface, "driver")
            if os.path.islink(link):
                continue
            path = os.path.join(self._bus, "drivers_probe")
            try:
                self._write(path, interface)
            except OSError as exc:
                raise internal(f"writing {interface} to {path} failed: {exc.strerror}") from exc
            if os.path.islink(link):
                found.append(interface)
        return found

    def _name(self, bus: int, device: int) -> str:
        """The device's name in sysfs, which is made of the ports on the way to it."""
        for name in self._names():
            if self._number(name, "busnum") == bus and self._number(name, "devnum") == device:
                return name
        raise TapmanagerError("not-found", f"there is no USB device {bus:03}/{device:03} on this node")

    def _names(self) -> list[str]:
        """The names of all devices and interfaces."""
        return names_in(os.path.join(self._bus, "devices"))  # empty if the kernel has no USB

    def _number(self, name: str, attribute: str) -> int:
        """The attribute's number; 0, which no device has, for an interface or a device that has just gone."""
        value = value_in(os.path.join(self._bus, "devices", name, attribute))
        return int(value) if value.isdecimal() else 0

    def _interfaces(self, name: str) -> Iterator[str]:
        """`1-4:1.0`: the device's name, then configuration and number."""
        return (other for other in self._names() if other.startswith(f"{name}:"))
