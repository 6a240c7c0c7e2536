"""A USB bus in a directory like sysfs, with a fake kernel that acts on writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class FakeUsbBus:
    """`root` stands for /sys. `homes`: interface -> the driver that wants it. `write` is the kernel."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.homes: dict[str, str] = {}
        self.written: list[str] = []
        self._devices = root / "bus/usb/devices"
        self._devices.mkdir(parents=True)

    def add(self, name: str, bus: int, device: int, **interfaces: str) -> None:
        """Adds a device. `interfaces`: number -> its driver, "" for none; i0="usb-storage"."""
        home = self._devices / name
        home.mkdir()
        (home / "busnum").write_text(f"{bus}\n")
        (home / "devnum").write_text(f"{device}\n")
        for number, driver in interfaces.items():
            interface = f"{name}:1.{number[1:]}"
            (self._devices / interface).mkdir()
            if driver:
                self._attach(interface, driver)

    def driver(self, interface: str) -> str:
        link = self._devices / interface / "driver"
        return os.path.basename(os.readlink(link)) if link.is_symlink() else ""

    def write(self, path: str, text: str) -> None:
        assert os.path.relpath(path, self.root) == "bus/usb/drivers_probe"
        if not (self._devices / text).exists():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.written.append(text)
        if text in self.homes:
            self._attach(text, self.homes[text])

    def _attach(self, interface: str, driver: str) -> None:
        (self._devices / interface / "driver").symlink_to(f"../../drivers/{driver}")
