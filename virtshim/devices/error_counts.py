"""What the kernel has counted of a PCI function's errors (AER): implements `virtshim.ports.devices.DeviceErrorCounts`."""

from __future__ import annotations

from virtshim.devices.host_files import HostFiles
from virtshim.devices.pci import FUNCTIONS, first_address
from virtshim.domain.devices.granted import DeviceErrors, PciAddress


class AerCounts:
    def __init__(self, files: HostFiles) -> None:
        self._files = files

    def of(self, address: PciAddress) -> DeviceErrors | None:
        """See the port. Virtual functions have no counts of their own on most cards: theirs are with the physical one.

        After a fatal error the kernel does not read the device, which may not answer (aer_get_device_error_info): its own count
        stays as it was. The root port has heard of the error, and counts for all that is behind it.
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
    """Of lines `NAME count`."""
    for line in text.splitlines():
        word, _, count = line.partition(" ")
        if word == name and count.strip().isdecimal():
            return int(count)
    return None
