"""PCI functions that are taken from their drivers for a VM, and given back when no container holds them."""

from __future__ import annotations

import contextlib
import threading

import structlog

from virtshim.domain.devices import BorrowedDevice, GrantedDevices, PciFunction
from virtshim.domain.errors import NotFound, ShimError
from virtshim.ports.devices import BorrowedTable, DeviceDrivers
from virtshim.ports.records import Records

log = structlog.get_logger(__name__)

_VFIO = "vfio-pci"


class BorrowedDevices:
    """`binds`: whether devices are taken at all; elsewhere a device plugin, or libvirt, does it. `timeout`: seconds for each call
    to tapmanager. One lock for all pods: who takes a device must not meet who gives it back."""

    def __init__(
        self, records: Records, table: BorrowedTable, drivers: DeviceDrivers, timeout: float, *, binds: bool
    ) -> None:
        self._records = records
        self._table = table
        self._drivers = drivers
        self._timeout = timeout
        self._binds = binds
        self._lock = threading.Lock()

    def take(self, granted: GrantedDevices) -> None:
        """The caller's container holds the claims already. The row is written before the driver changes, so that after a crash
        the device finds its way back."""
        if not self._binds:
            return
        with self._lock:
            for device in granted.passthrough:
                if isinstance(device, PciFunction):
                    self._take(device)

    def _take(self, device: PciFunction) -> None:
        address = device.address
        if self._table.get(device.claim) is None:
            driver = self._drivers.driver(address, self._timeout)
            if (
                "vfio" in driver
            ):  # a plugin, or the machine's own set-up, has bound it: maybe to a variant of its vendor's
                return
            self._table.add(BorrowedDevice(address, driver))
        self._drivers.bind(address, _VFIO, self._timeout)
        log.info("device.taken", device=str(address))

    def give_back(self) -> None:
        """All that no container holds. What cannot be given back now is tried again with the next, and at the next start."""
        for device in self._table.all():
            with self._lock:
                if any(device.claim in container.claims for container in self._records.containers.all()):
                    continue
                try:
                    with contextlib.suppress(NotFound):  # unplugged
                        self._drivers.bind(device.address, device.driver, self._timeout)
                    self._table.delete(device.claim)
                except ShimError as exc:
                    log.warning(
                        "device.not_given_back", device=str(device.address), driver=device.driver, error=str(exc)
                    )
                    continue
            log.info("device.given_back", device=str(device.address), driver=device.driver)
