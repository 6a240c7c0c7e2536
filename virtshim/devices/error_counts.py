"""What the kernel has counted of a PCI function's errors (AER): implements `virtshim.ports.devices.DeviceErrorCounts`."""

from __future__ import annotations

from virtshim.devices.host_files import HostFiles
from virtshim.devices.pci import FUNCTIONS
from virtshim.domain.devices import DeviceErrors, PciAddress


class AerCounts:
    def __init__(self, files: HostFiles) -> None:
        self._files = files

    def of(self, address: PciAddress) -> DeviceErrors | None:
        """See the port. Virtual functions have no counts of their own on most cards: theirs are with the physical one."""
        fatal = _total(self._files.text(f"{FUNCTIONS}/{address}/aer_dev_fatal"), "TOTAL_ERR_FATAL")
        nonfatal = _total(self._files.text(f"{FUNCTIONS}/{address}/aer_dev_nonfatal"), "TOTAL_ERR_NONFATAL")
        return None if fatal is None or nonfatal is None else DeviceErrors(fatal, nonfatal)


def _total(text: str, name: str) -> int | None:
    """Of lines `NAME count`."""
    for line in text.splitlines():
        word, _, count = line.partition(" ")
        if word == name and count.strip().isdecimal():
            return int(count)
    return None
