"""The machine's USB devices, as its kernel lists them. Runs in the machine."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from cluster import WAIT_LIMIT
from podclient import wait_until

_DEVICES: Final = Path("/sys/bus/usb/devices")


@dataclass(frozen=True)
class UsbDevice:
    """`name`: in sysfs, by the ports on the way to it. A device that was unplugged comes back as another one."""

    name: str
    bus: int
    device: int

    @classmethod
    def with_serial(cls, serial: str) -> Self:
        """The device with that serial. Raises LookupError."""
        for directory in sorted(_DEVICES.iterdir()):
            with contextlib.suppress(OSError):  # an interface, or it has just gone
                if (directory / "serial").read_text().strip() == serial:
                    numbers = (int((directory / name).read_text()) for name in ("busnum", "devnum"))
                    return cls(directory.name, *numbers)
        raise LookupError(f"no USB device with serial number {serial}")

    @property
    def node(self) -> str:
        return f"/dev/bus/usb/{self.bus:03}/{self.device:03}"

    @property
    def hint(self) -> str:
        """The device as in the variable of KubeVirt's device plugin."""
        return f"{self.bus}:{self.device}"

    @property
    def driver(self) -> str:
        """The driver of its first interface; "" for none."""
        link = _DEVICES / f"{self.name}:1.0" / "driver"
        return os.path.basename(os.readlink(link)) if link.is_symlink() else ""

    def unplug(self) -> None:
        """Unplugs it; returns when the kernel has forgotten it."""
        self._port().write_text("1")
        wait_until(lambda: not os.path.exists(self.node), WAIT_LIMIT, f"{self.node} is gone")

    def plug_in(self) -> None:
        """Plugs it into its port; the kernel needs a moment to find it."""
        self._port().write_text("0")

    def _port(self) -> Path:
        bus, port = self.name.split("-")
        return _DEVICES / f"{bus}-0:1.0" / f"usb{bus}-port{port}" / "disable"
