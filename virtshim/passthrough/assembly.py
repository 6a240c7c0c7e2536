"""Wires the services that handle host devices before, while and after a VM has them."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.passthrough.borrowing import BorrowedDevices
from virtshim.passthrough.claims import DeviceClaims
from virtshim.passthrough.health import DeviceHealth
from virtshim.passthrough.releases import DeviceReleases
from virtshim.passthrough.resets import DeviceResets
from virtshim.passthrough.unplug import UnplugDevices
from virtshim.passthrough.usb_drivers import UsbReprobe
from virtshim.ports.clock import Clock
from virtshim.ports.devices import BorrowedTable, ConditionTable, DeviceDrivers, DeviceErrorCounts, Devices
from virtshim.ports.hypervisor import Hypervisor, VmUnplugging
from virtshim.ports.records import Records
from virtshim.primitives.pod_locks import PodLocks


@dataclass(frozen=True, slots=True)
class DeviceRules:
    """As [devices] in the settings. `timeout`: seconds for each call to tapmanager."""

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
    borrowed: BorrowedTable
    conditions: ConditionTable


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
