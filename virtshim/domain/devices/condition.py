"""Known faults of a PCI function of the host, between the VM that had it and the next one. Values only; no I/O."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from virtshim.domain.devices.granted import PciAddress, PciFunction


@dataclass(frozen=True, slots=True)
class DeviceCondition:
    """`reset_failed_at`: nanoseconds since the epoch; 0: its last reset worked. `error`: that failure's message. `fatal`: the
    fatal errors that were counted when it was last reset, which are over since."""

    address: PciAddress
    reset_failed_at: int = 0
    error: str = ""
    fatal: int = 0

    @property
    def claim(self) -> str:
        return PciFunction(self.address).claim

    @property
    def is_notable(self) -> bool:
        return bool(self.reset_failed_at or self.fatal)

    @property
    def fault(self) -> str:
        """Why no VM gets it, as the predicate of a sentence about the device; "" if no fault is known."""
        if not self.reset_failed_at:
            return ""
        at = dt.datetime.fromtimestamp(self.reset_failed_at // 10**9, dt.UTC)
        return f"could not be reset at {at:%Y-%m-%d %H:%M:%S} UTC ({self.error})"

    @property
    def remedy(self) -> str:
        return (
            f"reset it by hand (echo 1 > /sys/bus/pci/devices/{self.address}/reset), or power-cycle the node; virtshim tries "
            "again every few minutes, and when a container is granted it"
        )


UNRESPONSIVE = "does not answer: its configuration space reads as all ones"
UNRESPONSIVE_REMEDY = (
    "check the kernel log; remove it and rescan the bus (echo 1 > /sys/bus/pci/devices/{address}/remove, then "
    "echo 1 > /sys/bus/pci/rescan), or power-cycle the node"
)
