"""A PCI bus in a directory like sysfs, with a fake kernel that acts on writes."""

from __future__ import annotations

import os
from pathlib import Path


class FakePciBus:
    """`root` stands for /sys. `homes`: the driver that takes a function by itself. `broken` drivers take nothing. `opened`: IOMMU
    groups that VMs have open. `write` and `is_open` are the kernel."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bus = root / "bus/pci"
        self.homes: dict[str, str] = {}
        self.broken: set[str] = set()
        self.opened: set[int] = set()
        self.written: list[tuple[str, str]] = []
        (self.bus / "devices").mkdir(parents=True)
        (self.bus / "drivers").mkdir()

    def add_driver(self, name: str) -> None:
        (self.bus / "drivers" / name).mkdir()

    def add(
        self, address: str, driver: str = "", *, home: str = "", class_code: str = "0x020000", reset: bool = True
    ) -> Path:
        device = self.bus / "devices" / address
        device.mkdir()
        (device / "class").write_text(f"{class_code}\n")
        (device / "driver_override").write_text("(null)\n")
        if reset:
            (device / "reset").write_text("")
        self.homes[address] = home or driver
        if driver:
            self._attach(address, driver)
        return device

    def add_virtual(self, physical: str, number: int, address: str, driver: str) -> None:
        """Adds a VF of that card."""
        device, owner = self.add(address, driver), self.bus / "devices" / physical
        os.symlink(owner, device / "physfn")
        os.symlink(device, owner / f"virtfn{number}")

    def in_group(self, address: str, number: int) -> None:
        os.symlink(self.root / f"kernel/iommu_groups/{number}", self.bus / "devices" / address / "iommu_group")

    def is_open(self, node: str) -> bool:
        return int(node.removeprefix("/dev/vfio/")) in self.opened

    def driver(self, address: str) -> str:
        link = self.bus / "devices" / address / "driver"
        return os.path.basename(os.readlink(link)) if link.is_symlink() else ""

    def override(self, address: str) -> str:
        return (self.bus / "devices" / address / "driver_override").read_text().strip()

    # --- the kernel

    def write(self, path: str, text: str) -> None:
        """Acts on a write as the kernel does."""
        relative = os.path.relpath(path, self.bus)
        self.written.append((relative, text))
        name = os.path.basename(path)
        if name == "driver_override":
            Path(path).write_text(text if text.strip() else "(null)\n")
        elif name == "unbind":
            self._detach(text)
        elif name == "drivers_probe":
            self._probe(text)
        elif name == "bind":
            self._bind(Path(path).parent.name, text)
        elif name == "reset":
            Path(path).write_text(text)
        else:
            raise AssertionError(f"nobody writes {path}")

    def _probe(self, address: str) -> None:
        if self.driver(address):
            return
        wanted = self.override(address)
        self._bind(self.homes[address] if wanted in ("", "(null)") else wanted, address)

    def _bind(self, driver: str, address: str) -> None:
        if (
            driver
            and driver not in self.broken
            and (self.bus / "drivers" / driver).is_dir()
            and not self.driver(address)
        ):
            self._attach(address, driver)

    def _attach(self, address: str, driver: str) -> None:
        if not (self.bus / "drivers" / driver).is_dir():
            self.add_driver(driver)
        os.symlink(self.bus / "drivers" / driver, self.bus / "devices" / address / "driver")

    def _detach(self, address: str) -> None:
        (self.bus / "devices" / address / "driver").unlink()
