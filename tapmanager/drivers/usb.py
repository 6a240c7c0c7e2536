"""Drivers of USB devices of the host: QEMU takes interfaces from them, and gives them back when it ends, unless it is killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from tapmanager.errors import TapmanagerError, internal
from tapmanager.kernel_files import names_in, value_in, write_once


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
