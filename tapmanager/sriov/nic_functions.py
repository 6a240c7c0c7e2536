"""Virtual functions of network cards as guests' NICs: takes them from their kernel driver, and returns them before CNI DEL.

A plugin (sriov) has moved the function's interface into the pod's namespace. When the function is bound to VFIO, that interface
vanishes. When it is bound to its driver again, a new interface appears in the host's namespace, under a name that the kernel
chooses. DEL looks for the interface in the pod's namespace under the old name, so it is moved there first.

The plugin's or the operator's settings on the physical function (VLAN, trust, spoof-check and so on) also apply to the guest, and
they remove them. Some cards drop settings when the function changes its driver, so differing settings are set again each time.
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
from tapmanager.errors import TapmanagerError, internal, wrong_state
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

# Seconds to wait: drivers register their interface a moment after they bind the function.
_LINK_TIMEOUT = 10.0
_POLL = 0.02
# The plugin that configures functions on the card's side, and makes sure that no other pod uses them.
_CARDS_PLUGIN = "sriov"
_NO_MACS = frozenset({"", NO_MAC})
_USUAL_MTU = 1500


class HostLinks(PhysicalFunctionLinks, Protocol):
    """Changes of links by netlink, from the host's namespace. Raise TapmanagerError, OSError."""

    def move_in(self, name: str, function: NicFunction, netns_path: str) -> None:
        """Moves the host's link `name` into the namespace as the function's link, with its MAC and MTU."""

    def is_in(self, name: str, netns_path: str) -> bool: ...


class NicFunctions:
    def __init__(self, drivers: PciDrivers, links: HostLinks, card: PhysicalFunctions, sysfs: str = "/sys") -> None:
        self._drivers = drivers
        self._links = links
        self._card = card
        self._devices = os.path.join(sysfs, "bus/pci/devices")

    def virtual_functions(self, links: Sequence[KernelLink]) -> Mapping[str, str]:
        """Name -> PCI address, for the links that are virtual functions."""
        return {link.name: link.parent for link in links if link.parent and self._card.has(link.parent)}

    def planned(self, networks: Sequence[Network], links: Sequence[KernelLink]) -> tuple[NicFunction, ...]:
        """The pod's functions, with all data that returning them needs. Changes nothing. Raises TapmanagerError."""
        functions = self.virtual_functions(links)
        said = {network.pci_of(name) for network in networks for name in network.interfaces}
        drivers = {address: self._driver(address) for address in (*functions.values(), *sorted(said))}
        found = network_plan.functions_of(networks, links, functions, drivers)
        by_link = {name: network for network in networks for name in network.interfaces}
        completed = (self._completed(function, by_link[function.link]) for function in found)
        return tuple(function for function in completed if function is not None)

    def _driver(self, address: str) -> str:
        """Also empty if the address is not a PCI device of this node, because device plugins use other names for other
        devices."""
        try:
            return self._drivers.driver(address)
        except TapmanagerError:
            return ""

    def _completed(self, function: NicFunction, network: Network) -> NicFunction | None:
        """Adds the MAC of a function that the plugin found at VFIO, from the result or from the card. If the card has none, the
        guest's driver would choose one, and the guest could not find the NIC by its MAC. Then a MAC is set, if the card's own
        plugin configured the function. None: no MAC, but no address that would need it either."""
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
            f"{network.label(function.link)} is PCI device {function.pci} at VFIO, whose MAC is unknown, so the guest could not "
            "find it. Give the pod's attachment a `mac`, or set the VF's on the card (ip link set CARD vf NUMBER mac MAC)"
        )

    def _mac_at_the_card(self, address: str) -> str:
        """Empty if the card does not report it, e.g. because the card itself has no network driver."""
        try:
            settings = self._card.settings(self._card.place(address))
        except TapmanagerError:
            return ""
        return (settings.mac if settings else "") or ""

    def describe(self, address: str) -> Json:
        """For users: the function's driver, and for a card's VF also its number and current settings. Raises TapmanagerError."""
        driver = {"driver": self._drivers.driver(address)}
        place, settings = self._location_and_settings(address)
        if place is None:
            return driver
        told = (settings or VfSettings()).to_json()
        return {**driver, "card": place.physical, "number": place.number, "settings": told}

    def bind(self, address: str, driver: str) -> None:
        """Like `PciDrivers.bind`, for a function that is not a CNI NIC. Keeps the settings of a card's VF, except the MAC,
        which may be the function's own. Raises TapmanagerError."""
        place, before = self._location_and_settings(address)
        self._drivers.bind(address, driver)
        if place is not None and before is not None:
            self._reapply(address, place, dataclasses.replace(before, mac=None), guest=driver == VFIO)

    def _location_and_settings(self, address: str) -> tuple[VfLocation | None, VfSettings | None]:
        """The function's place and settings on its card; (None, None) if it is not a VF of a network card."""
        if not self._card.has(address):
            return None, None
        try:
            place = self._card.place(address)
        except TapmanagerError:  # not a network card, or one whose own driver makes no interface
            return None, None
        return place, self._card.current_settings(place)

    def take(self, function: NicFunction) -> None:
        """Binds the function to VFIO. The MAC is set on the card, so that the guest's driver cannot use another. Raises
        TapmanagerError if the card does not keep settings that confine the guest."""
        if not function.driver and function.settings is None:  # the plugin has done so
            return
        place = self._card.place(function.pci)
        recorded = function.settings or VfSettings()
        # Always set it: cards may report a MAC that the function chose itself, and that they forget later.
        self._card.set(place, VfSettings(mac=function.mac))
        if not function.driver:
            return
        self._drivers.bind(function.pci, VFIO)
        wanted = dataclasses.replace(recorded, mac=function.mac)
        if function.settings is not None:  # otherwise the card does not report its functions
            self._reapply(function.pci, place, wanted, guest=True)
        log.info("function.taken pci=%s driver=%s at=%s %s", function.pci, function.driver, place, wanted)

    def give_back(self, function: NicFunction, netns_path: str) -> None:
        """Restores the driver and the link as the plugin left them. `netns_path`: "" if the namespace is gone. May be
        repeated."""
        if not function.driver:  # it was at VFIO when the plugin configured it, so at most its MAC was changed here
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
        """Read before the driver changes. Rights that the card no longer grants by then were removed by somebody else."""
        if function.settings is None:
            return None
        before = None
        try:
            before = self._card.settings(self._card.place(function.pci))
        except (TapmanagerError, OSError) as exc:
            log.warning("function.not_asked pci=%s error=%s", function.pci, exc)
        return without_new_privileges(function.settings, before or VfSettings())

    def _reapply(self, address: str, place: VfLocation | None, wanted: VfSettings, *, guest: bool) -> None:
        """Sets lost settings again. `place`: None if it must still be found. For a guest, raises TapmanagerError if the
        result is not safe. Otherwise only logs problems, because the link must be returned anyway, and the plugin undoes its
        own settings."""
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
    return wrong_state(
        f"guests may not use {place} ({address}), because it did not keep its {lost} when bound to {VFIO}. Update the driver "
        "and firmware of the card, or remove the setting from the network's configuration"
    )


def give_all_back(functions: NicFunctions, wanted: Sequence[NicFunction], netns_path: str) -> tuple[NicFunction, ...]:
    """Returns all functions, with `is_back` set for those that were returned. Failures are logged, because DEL must be tried
    anyway."""
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
