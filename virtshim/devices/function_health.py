"""Which PCI functions are unhealthy although they could be attached: polled by the device plugin that offers them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import structlog

from virtshim.devices.pci import PciFacts
from virtshim.domain.devices.condition import UNRESPONSIVE, DeviceCondition
from virtshim.domain.devices.granted import PciAddress, PciFunction
from virtshim.domain.errors import ShimError
from virtshim.ports.devices import DeviceErrorCounts

log = structlog.get_logger(__name__)


class FunctionHealth:
    """`conditions`: by claim, what the daemon has found out with its resets; may raise ShimError, then the last known hold."""

    def __init__(self, counts: DeviceErrorCounts, conditions: Callable[[], Mapping[str, DeviceCondition]]) -> None:
        self._counts = counts
        self._read = conditions
        self._conditions: Mapping[str, DeviceCondition] = {}
        self._first: Mapping[PciAddress, int] = {}
        self._complaint = ""

    def look(self, functions: Iterable[PciFacts]) -> Mapping[PciAddress, str]:
        """The unhealthy functions and why, worded to follow the address. Called by one thread."""
        self._read_again()
        first: dict[PciAddress, int] = {}
        trouble: dict[PciAddress, str] = {}
        for facts in functions:
            address = facts.address
            known = self._conditions.get(PciFunction(address).claim, DeviceCondition(address))
            errors = self._counts.of(address)
            if errors is not None:
                # What was there when we came, or is less than before: counts begin anew when the kernel finds a device again.
                first[address] = min(self._first.get(address, errors.fatal), errors.fatal)
            new = _new_errors(first.get(address, 0), errors.fatal if errors else 0, known.fatal)
            if not facts.answers:
                trouble[address] = UNRESPONSIVE
            elif known.fault:
                trouble[address] = known.fault
            elif new:
                trouble[address] = (
                    f"has reported {new} fatal PCI Express error{'s' if new > 1 else ''}; it is reset when its VM ends, and OK "
                    "again then. Without a VM: reset it by hand, and restart this plugin"
                )
        self._first = first
        return trouble

    def _read_again(self) -> None:
        try:
            self._conditions = self._read()
            self._complaint = ""
        except ShimError as exc:
            if str(exc) != self._complaint:
                self._complaint = str(exc)
                log.warning("device.conditions_not_read", error=self._complaint)


def _new_errors(first: int, now: int, forgiven: int) -> int:
    """`forgiven`: those counted at its last reset; more than there are now are of an earlier life of the device. Pure."""
    return now - max(first, forgiven if forgiven <= now else 0)
