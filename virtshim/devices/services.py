"""Wires the services for host devices: before, while and after a VM has them."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.devices.claims import BorrowedDevices, DeviceClaims
from virtshim.devices.health import DeviceHealth
from virtshim.devices.ports import DeviceDrivers, DeviceErrorCounts, Devices
from virtshim.devices.releases import DeviceReleases
from virtshim.devices.resets import DeviceResets
from virtshim.devices.unplug import UnplugDevices, UsbReprobe
from virtshim.devices.values import BorrowedDevice, DeviceCondition
from virtshim.store.ports import Records, Table
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks
from virtshim.vm.ports import Hypervisor, VmUnplugging


@dataclass(frozen=True, slots=True)
class DeviceRules:
    """[devices] of the settings. `timeout`: seconds for each call to tapmanager."""

    bind: bool
    reset: bool
    unplug: float
    timeout: float


@dataclass(frozen=True, slots=True)
class DevicePorts:
    """The ports that these services need."""

    hypervisor: Hypervisor
    unplugging: VmUnplugging
    devices: Devices
    drivers: DeviceDrivers
    errors: DeviceErrorCounts
    borrowed: Table[str, BorrowedDevice]
    conditions: Table[str, DeviceCondition]


@dataclass(frozen=True, slots=True)
class DeviceServices:
    claims: DeviceClaims
    borrowed: BorrowedDevices
    health: DeviceHealth
    resets: DeviceResets
    releases: DeviceReleases
    unplug: UnplugDevices


def device_services(
    records: Records, out: DevicePorts, clock: Clock, locks: PodLocks, rules: DeviceRules
) -> DeviceServices:
    resets = DeviceResets(records, out.conditions, out.drivers, out.errors, clock, rules.timeout)
    usb = UsbReprobe(out.drivers, rules.timeout)
    releases = DeviceReleases(records, resets, usb, locks, rules.timeout, resets=rules.reset)
    return DeviceServices(
        claims=DeviceClaims(records, out.hypervisor, out.devices, resets, releases),
        borrowed=BorrowedDevices(records, out.borrowed, out.drivers, rules.timeout, binds=rules.bind),
        health=DeviceHealth(records, out.errors, resets),
        resets=resets,
        releases=releases,
        unplug=UnplugDevices(records, out.unplugging, clock, locks, rules.unplug),
    )
