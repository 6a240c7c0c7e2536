"""Virtual functions of network cards that are guests' NICs: taken from their kernel driver, and brought back before CNI DEL.

A plugin (sriov) has moved the function's interface into the pod's namespace. Once the function is VFIO's that interface is gone;
bound to its driver again, a new one appears in the host's namespace, under a name of the kernel's choice. DEL looks for it in the
pod's namespace under the old name, so it is put there first.

What the plugin, or the operator, has set for it on the physical function (VLAN, trust, spoof-check ...) holds for the guest as
well, and is theirs to undo. Some cards drop it when the function loses its driver: what differs then is set again, each way.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from tapmanager.drivers import VFIO, PciDrivers
from tapmanager.errors import TapmanagerError, internal
from tapmanager.fields import Json
from tapmanager.kernel_files import names_in
from tapmanager.links import network_plan
from tapmanager.links.network_plan import Network
from tapmanager.links.nic_plan import KernelLink
from tapmanager.links.pod_links import random_mac
from tapmanager.pod import NicFunction
from tapmanager.sriov.physical_function import PhysicalFunctionLinks, PhysicalFunctions, VfLocation
from tapmanager.sriov.vf_settings import NO_MAC, SettingMismatch, VfSettings, without_new_privileges

log = logging.getLogger(__name__)

# Drivers register their interface a moment after they took the function, in seconds.
_LINK_TIMEOUT = 10.0
_POLL = 0.02
# The plugin that configures a card's functions from the card's side, and has made sure that this one is nobody else's.
_CARDS_PLUGIN = "sriov"
_NO_MACS = frozenset({"", NO_MAC})
_USUAL_MTU = 1500


class HostLinks(PhysicalFunctionLinks, Protocol):
    """Changes of links by netlink, from the host's namespace. Raise TapmanagerError, OSError."""

    def move_in(self, name: str, function: NicFunction, netns_path: str) -> None:
        """The host's link `name` becomes the function's link in that namespace, with its MAC and MTU."""

    def is_in(self, name: str, netns_path: str) -> bool: ...


class NicFunctions:
    def __init__(self, drivers: PciDrivers, links: HostLinks, card: PhysicalFunctions, sysfs: str = "/sys") -> None:
        self._drivers = drivers
        self._links = links
        self._card = card
        self._devices = os.path.join(sysfs, "bus/pci/devices")

    def virtual_functions(self, links: Sequence[KernelLink]) -> Mapping[str, str]:
        """Names of those links that are virtual functions -> PCI address."""
        return {link.name: link.parent for link in links if link.parent and self._card.has(link.parent)}

    def planned(self, networks: Sequence[Network], links: Sequence[KernelLink]) -> tuple[NicFunction, ...]:
        """The pod's functions, with all that bringing them back needs. Nothing is changed. Raises TapmanagerError."""
        functions = self.virtual_functions(links)
        said = {network.pci_of(name) for network in networks for name in network.interfaces}
        drivers = {address: self._driver(address) for address in (*functions.values(), *sorted(said))}
        found = network_plan.functions_of(networks, links, functions, drivers)
        by_link = {name: network for network in networks for name in network.interfaces}
        completed = (self._completed(function, by_link[function.link]) for function in found)
        return tuple(function for function in completed if function is not None)

    def _driver(self, address: str) -> str:
        """Empty also for what is no PCI device of this node: device plugins call other devices by other names."""
        try:
            return self._drivers.driver(address)
        except TapmanagerError:
            return ""

    def _completed(self, function: NicFunction, network: Network) -> NicFunction | None:
        """One that the plugin found at VFIO has the MAC that its result tells, or the card has for it. A card that has none lets
        the guest's driver choose, and the guest could not find the NIC by it: then one is set, if it was the card's own plugin
        that was here. None: no MAC, but no address either that the guest would need it for."""
        if function.driver:
            return dataclasses.replace(function, settings=self._card.settings(self._card.place(function.pci)))
        function = dataclasses.replace(function, mtu=function.mtu or self._card.mtu(function.pci) or _USUAL_MTU)
        if function.mac not in _NO_MACS:
            return function
        set_for_it = self._mac_at_the_card(function.pci)
        if set_for_it not in _NO_MACS:
            return dataclasses.replace(function, mac=set_for_it)
        if set_for_it and _CARDS_PLUGIN in network.kinds:
            return dataclasses.replace(function, mac=random_mac(), settings=VfSettings(mac=set_for_it))
        if not function.addresses:
            return None
        raise internal(
            f"{network.label(function.link)} is PCI device {function.pci} at VFIO, whose MAC is not known: its guest could not "
            "find it. Give the pod's attachment a `mac`, or set the VF's on the card (ip link set CARD vf NUMBER mac MAC)"
        )

    def _mac_at_the_card(self, address: str) -> str:
        """Empty if the card does not tell: for one, because it has no network driver itself."""
        try:
            settings = self._card.settings(self._card.place(address))
        except TapmanagerError:
            return ""
        return (settings.mac if settings else "") or ""

    def describe(self, address: str) -> Json:
        """For users: the function's driver, and if it is a card's VF its number and what is set for it now. Raises
        TapmanagerError."""
        driver = {"driver": self._drivers.driver(address)}
        place, settings = self._location_and_settings(address)
        if place is None:
            return driver
        told = (settings or VfSettings()).to_json()
        return {**driver, "card": place.physical, "number": place.number, "settings": told}

    def bind(self, address: str, driver: str) -> None:
        """`PciDrivers.bind` for a function that is nobody's NIC by CNI: what is set for a card's VF stays, but for the MAC, which
        may be the function's own. Raises TapmanagerError."""
        place, before = self._location_and_settings(address)
        self._drivers.bind(address, driver)
        if place is not None and before is not None:
            self._reapply(address, place, dataclasses.replace(before, mac=None), guest=driver == VFIO)

    def _location_and_settings(self, address: str) -> tuple[VfLocation | None, VfSettings | None]:
        """Where it is on its card, and what is set for it there. (None, None) for what is no network card's VF."""
        if not self._card.has(address):
            return None, None
        try:
            place = self._card.place(address)
        except TapmanagerError:  # not a network card, or one whose own driver makes no interface
            return None, None
        return place, self._card.current_settings(place)

    def take(self, function: NicFunction) -> None:
        """From now on it is VFIO's. Its MAC is set from the card's side: the guest's driver can have no other. Raises
        TapmanagerError if the card does not keep the guest where its owner put it."""
        if not function.driver and function.settings is None:  # the plugin has done so
            return
        place = self._card.place(function.pci)
        recorded = function.settings or VfSettings()
        # Always: cards also tell of a MAC that the function gave itself, and would forget it.
        self._card.set(place, VfSettings(mac=function.mac))
        if not function.driver:
            return
        self._drivers.bind(function.pci, VFIO)
        wanted = dataclasses.replace(recorded, mac=function.mac)
        if function.settings is not None:  # else the card says nothing of its functions
            self._reapply(function.pci, place, wanted, guest=True)
        log.info("function.taken pci=%s driver=%s at=%s %s", function.pci, function.driver, place, wanted)

    def give_back(self, function: NicFunction, netns_path: str) -> None:
        """Its driver and its link as the plugin left them; `netns_path` "": there is no namespace any more. May be repeated."""
        if not function.driver:  # it was VFIO's when the plugin configured it; only its MAC may be ours
            if function.settings is not None:
                self._reapply(function.pci, None, function.settings, guest=False)
            return
        wanted = self._settings_to_restore(function)
        self._drivers.bind(function.pci, function.driver)
        if wanted is not None:
            self._reapply(function.pci, None, wanted, guest=False)
        log.info("function.given_back pci=%s driver=%s link=%s", function.pci, function.driver, function.link)
        if netns_path and not self._links.is_in(function.link, netns_path):
            self._links.move_in(self._new_link(function.pci), function, netns_path)

    def _settings_to_restore(self, function: NicFunction) -> VfSettings | None:
        """Asked before the driver changes: what the card does not allow any more by then was taken away by somebody else."""
        if function.settings is None:
            return None
        before = None
        try:
            before = self._card.settings(self._card.place(function.pci))
        except (TapmanagerError, OSError) as exc:
            log.warning("function.not_asked pci=%s error=%s", function.pci, exc)
        return without_new_privileges(function.settings, before or VfSettings())

    def _reapply(self, address: str, place: VfLocation | None, wanted: VfSettings, *, guest: bool) -> None:
        """`place` None: still to be found. For a guest what is not safe raises TapmanagerError. Else all trouble is logged: a
        link is brought back anyway, for the plugin undoes what it has set itself."""
        try:
            place = place or self._card.place(address)
            for one in self._card.reapply(place, wanted):
                if guest and one.is_unsafe:
                    raise _unsafe(address, place, one)
                log.warning("function.not_kept pci=%s %s", address, one)
        except (TapmanagerError, OSError) as exc:
            if guest:
                raise
            log.warning("function.not_put_back pci=%s wanted=%s error=%s", address, wanted, exc)

    def _new_link(self, address: str) -> str:
        until = time.monotonic() + _LINK_TIMEOUT
        while not (names := names_in(os.path.join(self._devices, address, "net"))):
            if time.monotonic() >= until:
                raise internal(
                    f"PCI device {address} has its driver back, but no interface appeared within {_LINK_TIMEOUT:g} s"
                )
            threading.Event().wait(_POLL)
        return names[0]


def _unsafe(address: str, place: VfLocation, lost: SettingMismatch) -> TapmanagerError:
    return TapmanagerError(
        "failed-precondition",
        f"no guest is let onto the network by {place} ({address}), which at {VFIO} did not keep its {lost}. Update the driver "
        "and firmware of the card, or take the setting out of the network's configuration",
    )


def give_all_back(functions: NicFunctions, wanted: Sequence[NicFunction], netns_path: str) -> tuple[NicFunction, ...]:
    """All of them, with `is_back` where that is done. What cannot be brought back is logged: DEL must be tried anyway."""
    return tuple(_freed_to(functions, function, netns_path) for function in wanted)


def _freed_to(functions: NicFunctions, function: NicFunction, netns_path: str) -> NicFunction:
    if function.is_back:
        return function
    try:
        functions.give_back(function, netns_path)
    except (TapmanagerError, OSError) as exc:
        log.warning("function.not_given_back pci=%s link=%s error=%s", function.pci, function.link, exc)
        return function
    return dataclasses.replace(function, is_back=True)
