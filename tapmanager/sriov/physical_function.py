"""The card's side of its virtual functions: which interface of the host stands for them, and what is set for them there.

/sys/class/net shows the namespace that sysfs was mounted in, wherever a thread is: all is found by PCI address.
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

from tapmanager.errors import TapmanagerError, internal
from tapmanager.kernel_files import names_in, value_in
from tapmanager.sriov.vf_settings import SettingMismatch, VfSettings, mismatched_settings

log = logging.getLogger(__name__)

# A function that was just reset is not told of by its card for a moment; in seconds.
SETTLES = 2.0
_POLL = 0.05
# Some settings reset the function, and others may go with that: once more, then it is judged.
_ROUNDS = 2
# Interfaces that stand for functions of the card (switchdev) hang on its PCI device as well: pf0vf3, c1pf0sf8.
_REPRESENTOR = re.compile(r"(c\d+)?pf\d+(vf|sf)\d+")


class PhysicalFunctionLinks(Protocol):
    """The host's links of network cards, by netlink. Raise TapmanagerError, OSError."""

    def vf_settings(self, physical: str, number: int) -> VfSettings | None:
        """None if the card says nothing of that function."""

    def set_vf(self, physical: str, number: int, change: VfSettings) -> None: ...


@dataclass(frozen=True, slots=True)
class VfLocation:
    """`physical`: the name of the card's own interface; `number`: of the VF on it."""

    physical: str
    number: int

    def __str__(self) -> str:
        return f"VF {self.number} of {self.physical}"


class PhysicalFunctions:
    """`settles`: seconds that a function has to be told of again."""

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
            raise TapmanagerError(
                "failed-precondition",
                f"the physical function of {address} has no network interface on the host: its MAC and VLAN cannot be set. Bind "
                "the card itself to its network driver",
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
        """Of the card's own interface, which bounds its functions'; 0 if it has none."""
        for name in self._own_interfaces(address):
            value = value_in(os.path.join(self._devices, address, "physfn/net", name, "mtu"))
            if value.isdecimal():
                return int(value)
        return 0

    def settings(self, place: VfLocation) -> VfSettings | None:
        """None if the card does not tell within the time that it has. Raises TapmanagerError, OSError."""
        until = time.monotonic() + self._settles
        while (found := self.current_settings(place)) is None and time.monotonic() < until:
            threading.Event().wait(_POLL)
        return found

    def current_settings(self, place: VfLocation) -> VfSettings | None:
        return self._links.vf_settings(place.physical, place.number)

    def set(self, place: VfLocation, change: VfSettings) -> None:
        self._links.set_vf(place.physical, place.number, change)

    def reapply(self, place: VfLocation, wanted: VfSettings) -> tuple[SettingMismatch, ...]:
        """Sets what differs on the card, and nothing else; returns what differs even then. Raises TapmanagerError if the settings
        cannot be read, OSError."""
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
        """ "" for a driver that gives its ports no names."""
        return value_in(os.path.join(self._devices, address, "physfn/net", interface, "phys_port_name"))
