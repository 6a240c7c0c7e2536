"""PCI functions that are taken from their drivers for a VM, and given back when no container holds them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import structlog

from virtshim.domain.container import Container
from virtshim.domain.devices.granted import BorrowedDevice, GrantedDevices, PciFunction
from virtshim.domain.devices.vfio import VFIO_PCI, is_vfio_driver
from virtshim.domain.errors import DeadlineExceeded, NotFound, ShimError
from virtshim.ports.devices import BorrowedTable, DeviceDrivers
from virtshim.ports.records import Records

log = structlog.get_logger(__name__)


class BorrowedDevices:
    """`binds`: whether devices are taken at all; elsewhere a device plugin, or libvirt, does it. `timeout`: seconds for each call
    to tapmanager. Taking and giving back one device exclude each other; a device whose driver hangs delays no other."""

    def __init__(
        self, records: Records, table: BorrowedTable, drivers: DeviceDrivers, timeout: float, *, binds: bool
    ) -> None:
        self._records = records
        self._table = table
        self._drivers = drivers
        self._timeout = timeout
        self._binds = binds
        self._locks: dict[str, threading.Lock] = {}

    def take(self, granted: GrantedDevices) -> None:
        """The caller's container holds the claims already. The row is written before the driver changes, so that after a crash
        the device finds its way back."""
        if not self._binds:
            return
        for device in granted.passthrough:
            if isinstance(device, PciFunction):
                with self._lock(device.claim):
                    self._take(device)

    def _take(self, device: PciFunction) -> None:
        address = device.address
        if self._table.get(device.claim) is None:
            driver = self._drivers.driver(address, self._timeout)
            # A plugin, or the machine's own set-up, has bound it: maybe to a variant of its vendor's.
            if is_vfio_driver(driver):
                return
            self._table.add(BorrowedDevice(address, driver))
        self._drivers.bind(address, VFIO_PCI, self._timeout)
        log.info("device.taken", device=str(address))

    def idle(self) -> Sequence[BorrowedDevice]:
        """Those that no container holds, and that are still to be given back."""
        held = {claim for container in self._records.containers.all() for claim in container.claims}
        return [device for device in self._table.all() if device.claim not in held]

    def give_back_of(self, container: Container) -> None:
        """What that container had, which is gone. What cannot be given back now is left to the reconciler, and to the next start;
        so are all that follow one whose driver hangs."""
        had = {*container.granted.claims, *container.claims}
        for device in self.idle():
            if device.claim in had:
                try:
                    self.give_back(device)
                except DeadlineExceeded:
                    return
                except ShimError:  # told
                    continue

    def give_back(self, device: BorrowedDevice) -> None:
        """Nothing happens if a container holds it now. Raises ShimError."""
        with self._lock(device.claim):
            if all(device.claim != idle.claim for idle in self.idle()):
                return
            try:
                with contextlib.suppress(NotFound):  # unplugged
                    self._drivers.bind(device.address, device.driver, self._timeout)
                self._table.delete(device.claim)
            except ShimError as exc:
                log.warning("device.not_given_back", device=str(device.address), driver=device.driver, error=str(exc))
                raise
        log.info("device.given_back", device=str(device.address), driver=device.driver)

    def _lock(self, claim: str) -> threading.Lock:
        return self._locks.setdefault(claim, threading.Lock())
