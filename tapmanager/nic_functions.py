"""Virtual functions of network cards that are guests' NICs: taken from their kernel driver, and brought back before CNI DEL.

A plugin (sriov) has moved the function's interface into the pod's namespace. Once the function is VFIO's that interface is gone;
bound to its driver again, a new one appears in the host's namespace, under a name of the kernel's choice. DEL looks for it in the
pod's namespace under the old name, so it is put there first. What the plugin has set on the physical function (VLAN, rate, trust)
stays there meanwhile: it is transparent to the guest, and is the plugin's to undo.

/sys/class/net shows the namespace that sysfs was mounted in, wherever a thread is: a function is found by its PCI address.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tapmanager import links_plan
from tapmanager.cni_result import CniResult
from tapmanager.errors import NetError, internal
from tapmanager.links_plan import KernelLink
from tapmanager.pci_drivers import VFIO, PciDrivers
from tapmanager.pod import NicFunction

log = logging.getLogger(__name__)

# Drivers register their interface a moment after they took the function, in seconds.
_APPEARS = 10.0
_POLL = 0.02


class HostLinks(Protocol):
    """Changes of links by netlink, from the host's namespace. Raise NetError, OSError."""

    def vf_mac(self, physical: str, number: int) -> str:
        """The MAC that the physical function's owner has set for its VF; zeros or "" if none."""

    def set_vf_mac(self, physical: str, number: int, mac: str) -> None: ...

    def move_in(self, name: str, function: NicFunction, netns_path: str) -> None:
        """The host's link `name` becomes the function's link in that namespace, with its MAC and MTU."""

    def is_in(self, name: str, netns_path: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Place:
    """`physical`: the name of the card's own interface; `number`: of the VF on it."""

    physical: str
    number: int


class NicFunctions:
    def __init__(self, drivers: PciDrivers, links: HostLinks, sysfs: str = "/sys") -> None:
        self._drivers = drivers
        self._links = links
        self._devices = os.path.join(sysfs, "bus/pci/devices")

    def among(self, links: Sequence[KernelLink]) -> Mapping[str, str]:
        """Names of those links that are virtual functions -> PCI address."""
        return {
            link.name: link.parent
            for link in links
            if link.parent and os.path.exists(os.path.join(self._devices, link.parent, "physfn"))
        }

    def planned(self, result: CniResult, links: Sequence[KernelLink]) -> tuple[NicFunction, ...]:
        """The pod's functions, with all that bringing them back needs. Nothing is changed."""
        functions = self.among(links)
        drivers = {address: self._drivers.driver(address) for address in functions.values()}
        found = links_plan.plan_functions(result, links, functions, drivers)
        return tuple(
            dataclasses.replace(function, admin_mac=self._admin_mac(function.pci)) if function.driver else function
            for function in found
        )

    def _admin_mac(self, address: str) -> str:
        place = self._place(address)
        return self._links.vf_mac(place.physical, place.number)

    def take(self, function: NicFunction) -> None:
        """From now on it is VFIO's. Its MAC is set from the card's side: the guest's driver can have no other."""
        if not function.driver:  # the plugin has done so
            return
        place = self._place(function.pci)
        self._links.set_vf_mac(place.physical, place.number, function.mac)
        self._drivers.bind(function.pci, VFIO)

    def give_back(self, function: NicFunction, netns_path: str) -> None:
        """Its driver and its link as the plugin left them; `netns_path` "": there is no namespace any more. May be repeated."""
        if not function.driver:  # it was VFIO's when the plugin configured it
            return
        self._drivers.bind(function.pci, function.driver)
        if function.admin_mac:
            place = self._place(function.pci)
            self._links.set_vf_mac(place.physical, place.number, function.admin_mac)
        if netns_path and not self._links.is_in(function.link, netns_path):
            self._links.move_in(self._new_link(function.pci), function, netns_path)

    def _new_link(self, address: str) -> str:
        until = time.monotonic() + _APPEARS
        while not (names := self._names(os.path.join(address, "net"))):
            if time.monotonic() >= until:
                raise internal(
                    f"PCI device {address} has its driver back, which made no interface within {_APPEARS:g} s"
                )
            threading.Event().wait(_POLL)
        return names[0]

    def _place(self, address: str) -> _Place:
        physical = self._names(os.path.join(address, "physfn/net"))
        if not physical:
            raise NetError(
                "failed-precondition",
                f"the physical function of {address} has no network interface on the host: its MAC cannot be set. Bind the card "
                "itself to its network driver",
            )
        owner = os.path.realpath(os.path.join(self._devices, address, "physfn"))
        for name in self._names(os.path.join(address, "physfn")):
            number = name.removeprefix("virtfn")
            if number != name and number.isdecimal():
                target = os.path.realpath(os.path.join(owner, name))
                if os.path.basename(target) == address:
                    return _Place(physical[0], int(number))
        raise internal(f"PCI device {address} is none of the virtual functions of {os.path.basename(owner)}")

    def _names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(os.path.join(self._devices, path)))
        except FileNotFoundError:
            return []


def give_all_back(functions: NicFunctions, wanted: Sequence[NicFunction], netns_path: str) -> None:
    """What cannot be brought back is logged: DEL must be tried anyway."""
    for function in wanted:
        try:
            functions.give_back(function, netns_path)
        except (NetError, OSError) as exc:
            log.warning("function.not_given_back pci=%s link=%s error=%s", function.pci, function.link, exc)
