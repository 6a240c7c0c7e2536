"""Which PCI functions are unhealthy although they could be attached. The device plugin that offers them polls this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import structlog

from virtshim.devices.host_files import HostFiles
from virtshim.devices.pci import FUNCTIONS, PciFacts, first_address
from virtshim.devices.ports import DeviceErrorCounts
from virtshim.devices.values import UNRESPONSIVE, DeviceCondition, DeviceErrors, PciAddress, PciFunction
from virtshim.model.errors import ShimError

log = structlog.get_logger(__name__)


class FunctionHealth:
    """`conditions`: what the daemon's resets have shown, by claim. If it raises ShimError, the last known conditions
    hold."""

    def __init__(self, counts: DeviceErrorCounts, conditions: Callable[[], Mapping[str, DeviceCondition]]) -> None:
        self._counts = counts
        self._read = conditions
        self._conditions: Mapping[str, DeviceCondition] = {}
        self._first: Mapping[PciAddress, int] = {}
        self._complaint = ""

    def look(self, functions: Iterable[PciFacts]) -> Mapping[PciAddress, str]:
        """The unhealthy functions with the reason, worded to follow the address. Called by one thread."""
        self._read_again()
        first: dict[PciAddress, int] = {}
        trouble: dict[PciAddress, str] = {}
        for facts in functions:
            address = facts.address
            known = self._conditions.get(PciFunction(address).claim, DeviceCondition(address))
            errors = self._counts.errors(address)
            if errors is not None:
                # The first count seen, or a smaller one: the kernel counts from 0 when it finds a device again.
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
    """`forgiven`: errors counted at the last reset. If there are fewer now, those belonged to an earlier life of the
    device. Pure."""
    return now - max(first, forgiven if forgiven <= now else 0)


# The kernel's error counts of a PCI function (AER). Implements `virtshim.devices.ports.DeviceErrorCounts`.


class AerCounts:
    def __init__(self, files: HostFiles) -> None:
        self._files = files

    def errors(self, address: PciAddress) -> DeviceErrors | None:
        """Virtual functions have no counts of their own on most cards: theirs are with the physical one.

        After a fatal error the kernel does not read the device, which may not answer (aer_get_device_error_info), so
        the device's own count stays as it was. The root port has received the error, and counts for all devices behind
        it.
        """
        fatal = _total(self._files.text(f"{FUNCTIONS}/{address}/aer_dev_fatal"), "TOTAL_ERR_FATAL")
        nonfatal = _total(self._files.text(f"{FUNCTIONS}/{address}/aer_dev_nonfatal"), "TOTAL_ERR_NONFATAL")
        if fatal is None or nonfatal is None:
            return None
        return DeviceErrors(max(fatal, self._heard_by_root_port(address)), nonfatal)

    def _heard_by_root_port(self, address: PciAddress) -> int:
        port = first_address(self._files.target(f"{FUNCTIONS}/{address}"))
        count = self._files.text(f"{FUNCTIONS}/{port}/aer_rootport_total_err_fatal").strip()
        return int(count) if count.isdecimal() else 0


def _total(text: str, name: str) -> int | None:
    """Finds `name` in lines of the form `NAME count`."""
    for line in text.splitlines():
        word, _, count = line.partition(" ")
        if word == name and count.strip().isdecimal():
            return int(count)
    return None
