"""Devices of the host in VMs: errors that the kernel counts are told, and functions are reset when their VM has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import structlog

from virtshim.domain.container import Container, ContainerPhase
from virtshim.domain.devices import DeviceErrors, PciAddress, PciFunction
from virtshim.domain.errors import ShimError
from virtshim.ports.devices import DeviceDrivers, DeviceErrorCounts
from virtshim.ports.records import Records

log = structlog.get_logger(__name__)


class DeviceHealth:
    """`resets`: whether functions are reset by us; the kernel does it too, when QEMU lets go of them. `timeout`: seconds for each
    call to tapmanager."""

    def __init__(
        self, records: Records, counts: DeviceErrorCounts, drivers: DeviceDrivers, timeout: float, *, resets: bool
    ) -> None:
        self._records = records
        self._counts = counts
        self._drivers = drivers
        self._timeout = timeout
        self._resets = resets
        self._seen: Mapping[PciAddress, DeviceErrors] = {}

    def errors(self, container: Container) -> Mapping[PciAddress, DeviceErrors]:
        """Of its functions those for which the kernel counts."""
        found = ((address, self._counts.of(address)) for address in _functions(container))
        return {address: errors for address, errors in found if errors is not None}

    def look(self) -> None:
        """One round: tells of errors that came since the last. Called by one thread."""
        now: dict[PciAddress, DeviceErrors] = {}
        for container in self._records.containers.all():
            if container.phase is ContainerPhase.RUNNING:
                for address, errors in self.errors(container).items():
                    now[address] = errors
                    before = self._seen.get(address, errors)
                    if errors.fatal > before.fatal or errors.nonfatal > before.nonfatal:
                        log.warning(
                            "device.errors",
                            device=str(address),
                            container=container.id.short,
                            fatal=errors.fatal - before.fatal,
                            nonfatal=errors.nonfatal - before.nonfatal,
                        )
        self._seen = now

    def ended(self, container: Container) -> None:
        """Its VM is off, and the devices are still its own: nobody else's VM is reset."""
        for address in _functions(container) if self._resets and container.claims else ():
            try:
                if not self._drivers.reset(address, self._timeout):
                    log.warning("device.no_reset", device=str(address), container=container.id.short)
            except ShimError as exc:  # its end is recorded all the same; the next check of the device tells more
                log.warning("device.reset_failed", device=str(address), container=container.id.short, error=str(exc))


def _functions(container: Container) -> Iterator[PciAddress]:
    return (device.address for device in container.granted.passthrough if isinstance(device, PciFunction))
