"""Takes host devices from a guest before its VM is killed, and gives USB devices back to the node's drivers
afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from virtshim.devices.ports import DeviceDrivers
from virtshim.devices.values import UsbDevice
from virtshim.model.container import Container, Exit, ExitReason
from virtshim.model.errors import NotFound, ShimError
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks
from virtshim.vm.ports import VmUnplugging

# Before a VM is ended by force, its guest is asked to release the host devices. Its drivers can then finish their work,
# which they cannot if the VM just ends.

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class UnplugDevices:
    """`seconds`: how long a guest gets, 0 to not ask it. Devices that the guest keeps are taken when the VM ends."""

    records: Records
    unplugging: VmUnplugging
    clock: Clock
    locks: PodLocks
    seconds: float

    def before_kill(self, container: Container, message: str) -> None:
        """Records the end first: if virtshim dies in between, a VM without its devices must not keep running. Never
        raises, because the VM is to end."""
        if not self._wanted(container):
            return
        try:
            if self._written_down(container, message):
                log.info("vm.unplug.asked", container=container.id.short)
                self._unplug(container)
        except ShimError as exc:  # without a record nothing is unplugged
            log.warning("vm.unplug.failed", container=container.id.short, error=str(exc))

    def before_removal(self, container: Container) -> None:
        """For a container whose record already says that it is being removed. Never raises."""
        if self._wanted(container):
            try:
                self._unplug(container)
            except ShimError as exc:
                log.warning("vm.unplug.failed", container=container.id.short, error=str(exc))

    def _wanted(self, container: Container) -> bool:
        on_pci = any(not isinstance(device, UsbDevice) for device in container.granted.passthrough)
        return self.seconds > 0 and on_pci and container.is_running

    def _written_down(self, container: Container, message: str) -> bool:
        """False if the container has ended meanwhile, or another call holds its pod's lock."""
        with self.locks.held_soon(container.sandbox_id, self.seconds) as held:
            if not held:
                return False
            found = self.records.containers.get(container.id)
            if found is None or not found.is_running:
                return False
            if found.status.ending is None:
                how = Exit(137, ExitReason.ERROR, self.clock.now_ns(), message)
                self.records.containers.replace(found.with_ending(how))
            return True

    def _unplug(self, container: Container) -> None:
        begun = self.clock.monotonic()
        domain = container.domain_uuid
        left = self.unplugging.unplug(domain, container.id, self.seconds)
        log.info(
            "vm.unplugged",
            container=container.id.short,
            devices=list(container.granted.claims),
            kept_by_guest=list(left),
            seconds=round(self.clock.monotonic() - begun, 3),
        )


@dataclass(frozen=True, slots=True)
class UsbReprobe:
    """QEMU gives USB devices back by itself, unless it was killed. `timeout`: seconds for each call to tapmanager."""

    drivers: DeviceDrivers
    timeout: float

    def after(self, container: Container) -> None:
        """Called when the VM is off and still has its claims, so that no other VM loses a device."""
        for device in container.granted.passthrough:
            if isinstance(device, UsbDevice) and device.claim in container.claims:
                self._give_back(device)

    def _give_back(self, device: UsbDevice) -> None:
        name = f"{device.bus:03}/{device.device:03}"
        try:
            interfaces = self.drivers.probe_usb(device, self.timeout)
        except NotFound:  # it was unplugged
            return
        except ShimError as exc:  # the next VM can have the device anyway
            log.warning("usb.not_given_back", device=name, error=str(exc))
            return
        if interfaces:
            log.info("usb.given_back", device=name, interfaces=interfaces)
