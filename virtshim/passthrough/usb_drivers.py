"""Rebinds USB devices to the node's drivers when their VM has ended: QEMU does it itself, unless it was killed."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from virtshim.domain.container import Container
from virtshim.domain.devices.granted import UsbDevice
from virtshim.domain.errors import NotFound, ShimError
from virtshim.ports.devices import DeviceDrivers

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class UsbReprobe:
    """`timeout`: seconds for each call to tapmanager."""

    drivers: DeviceDrivers
    timeout: float

    def after(self, container: Container) -> None:
        """Its VM is off, and the devices are still its own: nobody else's VM loses one."""
        for device in container.granted.passthrough:
            if isinstance(device, UsbDevice) and device.claim in container.claims:
                self._give_back(device)

    def _give_back(self, device: UsbDevice) -> None:
        name = f"{device.bus:03}/{device.device:03}"
        try:
            interfaces = self.drivers.probe_usb(device, self.timeout)
        except NotFound:  # unplugged
            return
        except ShimError as exc:  # the next VM can have it all the same
            log.warning("usb.not_given_back", device=name, error=str(exc))
            return
        if interfaces:
            log.info("usb.given_back", device=name, interfaces=interfaces)
