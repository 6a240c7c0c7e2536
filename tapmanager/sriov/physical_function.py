"""The card's side of virtual functions: the card's interface on the host, and the settings of its functions.

Everything is found by PCI address, because /sys/class/net shows the namespace that sysfs was mounted in, not the thread's.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from tapmanager.errors import TapmanagerError, internal, wrong_state
from tapmanager.kernel_files import names_in, value_in
from tapmanager.sriov.vf_settings import SettingMismatch, VfSettings, mismatched_settings

log = logging.getLogger(__name__)

# Seconds to wait: a card does not report a function for a moment after its reset.
SETTLES = 2.0
_POLL = 0.05
# Attempts: some settings reset the function, which may drop others. They are set once more before the result counts.
_ROUNDS = 2
# Representors of the card's functions (switchdev) belong to the same PCI device: pf0vf3, c1pf0sf8.
_REPRESENTOR = re.compile(r"(c\d+)?pf\d+(vf|sf)\d+")


class PhysicalFunctionLinks(Protocol):
    """The host's links of network cards, by netlink. Raise TapmanagerError, OSError."""

    def vf_settings(self, physical: str, number: int) -> VfSettings | None:
        """None if the card does not report the function."""

    def set_vf(self, physical: str, number: int, change: VfSettings) -> None: ...


@dataclass(frozen=True, slots=True)
class VfLocation:
    """`physical`: the name of the card's interface. `number`: the number of the VF on it."""

    physical: str
    number: int

    def __str__(self) -> str:
        return f"VF {self.number} of {self.physical}"


class PhysicalFunctions:
    """`settles`: seconds within which a card must report a function again."""

    def __init__(self, links: PhysicalFunctionLinks, sysfs: str = "/sys", settles: float = SETTLES) -> None:
        self._links = links
        self._devices = os.path.join(sysfs, "bus/pci/devices")
        self._settles = settles

    def has(self, address: str) -> bool:
        """Whether it is a virtual function."""
        return os.path.exists(os.path.join(self._devices, address, "physfn"))

    def place(self, address: str) -> VfLocation:
        """Raises TapmanagerError."""
        physical = self._own_interfaces(address)
        if not physical:
            raise wrong_state(
                f"the physical function of {address} has no network interface on the host, so its MAC and VLAN cannot be set. "
                "Bind the card itself to its network driver"
            )
        owner = os.path.realpath(os.path.join(self._devices, address, "physfn"))
        for name in names_in(os.path.join(self._devices, address, "physfn")):
            number = name.removeprefix("virtfn")
            if number != name and number.isdecimal():
                target = os.path.realpath(os.path.join(owner, name))
                if os.path.basename(target) == address:
                    return VfLocation(physical[0], int(number))
        raise internal(f"PCI device {address} is not one of the virtual functions of {os.path.basename(owner)}")

    def mtu(self, address: str) -> int:
        """The MTU of the card's interface, which its functions cannot exceed; 0 if the card has no interface."""
        for name in self._own_interfaces(address):
            value = value_in(os.path.join(self._devices, address, "physfn/net", name, "mtu"))
            if value.isdecimal():
                return int(value)
        return 0

    def settings(self, place: VfLocation) -> VfSettings | None:
        """None if the card does not report the function in time. Raises TapmanagerError, OSError."""
        until = time.monotonic() + self._settles
        while (found := self.current_settings(place)) is None and time.monotonic() < until:
            threading.Event().wait(_POLL)
        return found

    def current_settings(self, place: VfLocation) -> VfSettings | None:
        return self._links.vf_settings(place.physical, place.number)

    def set(self, place: VfLocation, change: VfSettings) -> None:
        self._links.set_vf(place.physical, place.number, change)

    def reapply(self, place: VfLocation, wanted: VfSettings) -> tuple[SettingMismatch, ...]:
        """Sets only settings that differ on the card. Returns those that still differ. Raises TapmanagerError if the settings
        cannot be read, and OSError."""
        said: dict[str, str] = {}
        for _ in range(_ROUNDS):
            lost = self._lost(place, wanted)
            if not lost:
                return ()
            for one in lost:
                try:
                    self.set(place, one.wanted)
                    log.info("function.set_again card=%s vf=%d %s", place.physical, place.number, one.wanted)
                except TapmanagerError as exc:
                    said[one.name] = str(exc)
        return tuple(dataclasses.replace(one, why=said.get(one.name, "")) for one in self._lost(place, wanted))

    def _lost(self, place: VfLocation, wanted: VfSettings) -> tuple[SettingMismatch, ...]:
        return mismatched_settings(wanted, self.settings(place) or VfSettings())

    def _own_interfaces(self, address: str) -> list[str]:
        found = names_in(os.path.join(self._devices, address, "physfn/net"))
        return [name for name in found if not _REPRESENTOR.fullmatch(self._port_name(address, name))]

    def _port_name(self, address: str, interface: str) -> str:
        """The port's name; "" if the driver does not name its ports."""
        return value_in(os.path.join(self._devices, address, "physfn/net", interface, "phys_port_name"))
