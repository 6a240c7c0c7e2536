"""A fake network card with virtual functions: a PCI bus with its drivers, and the card's netlink interface."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from fakes.pcibus import FakePciBus

from tapmanager.errors import internal
from tapmanager.pod import NicFunction
from tapmanager.sriov.vf_settings import NO_MAC, VfSettings

PF = "0000:3b:00.0"
PHYSICAL = "enp59s0"
VFS = ("0000:3b:02.0", "0000:3b:02.1")
# A function without settings.
FRESH = VfSettings(NO_MAC, 0, 0, "802.1Q", 0, 0, True, "auto", False, False)


class FakeNetCard(FakePciBus):
    """Also `nic_functions.HostLinks`. `settings`: by VF number. `dropped`: what fields become when a function loses its driver.
    `refused`: fields that cannot be set while it has a driver, by driver. `silent`: how often a function is not told of after its
    driver has changed. `inside`: links in the pod's namespace. `done`: what was set and moved."""

    def __init__(self, root: Path) -> None:
        self.settings = dict.fromkeys(range(len(VFS)), FRESH)
        self.dropped: dict[str, Any] = {}
        self.refused: dict[str, set[str]] = {}
        self.silent = 0
        self.inside: set[str] = set()
        self.done: list[str] = []
        self._fails_in = 0
        self._unsaid = 0
        super().__init__(root)
        self.add_driver("vfio-pci")
        (self.add(PF, "ice") / "net" / PHYSICAL).mkdir(parents=True)
        for number, address in enumerate(VFS):
            self.add_virtual(PF, number, address, "iavf")

    def give(self, number: int, **settings: Any) -> None:
        """Another program changes a setting."""
        self.settings[number] = dataclasses.replace(self.settings[number], **settings)

    def fail(self, at: int) -> None:
        """Makes one of the next fallible operations fail, counted from 1; 0 for none."""
        self._fails_in = at

    def _step(self) -> None:
        self._fails_in -= 1
        if self._fails_in == 0:
            raise internal("it fails")

    # --- the kernel: drivers

    def write(self, path: str, text: str) -> None:
        self._step()
        super().write(path, text)

    def _detach(self, address: str) -> None:
        if address in VFS:
            self._reset(VFS.index(address))
        super()._detach(address)

    def _attach(self, address: str, driver: str) -> None:
        super()._attach(address, driver)
        if driver == "iavf":
            (self.bus / "devices" / address / "net" / f"eth{VFS.index(address)}").mkdir(parents=True, exist_ok=True)

    def _reset(self, number: int) -> None:
        self.give(number, **self.dropped)
        self._unsaid = self.silent

    # --- the kernel: netlink

    def vf_settings(self, physical: str, number: int) -> VfSettings | None:
        assert physical == PHYSICAL
        self._step()
        if self._unsaid:
            self._unsaid -= 1
            return None
        return self.settings[number]

    def set_vf(self, physical: str, number: int, change: VfSettings) -> None:
        assert physical == PHYSICAL
        self._step()
        fields = change.to_json()
        if self.refused.get(self.driver(VFS[number]), set()) & fields.keys():
            raise internal(f"setting {change}: the kernel refused: {os.strerror(95)}")
        self.give(number, **fields)
        self.done.append(f"{number} {change}")

    def move_in(self, name: str, function: NicFunction, netns_path: str) -> None:
        self._step()
        self.inside.add(function.link)
        self.done.append(f"move {name} as {function.link} into {netns_path}")

    def is_in(self, name: str, netns_path: str) -> bool:
        return name in self.inside
