"""The services for host devices: before, while and after a VM has them."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.devices.claims import BorrowedDevices, DeviceClaims
from virtshim.devices.health import DeviceHealth
from virtshim.devices.releases import DeviceReleases
from virtshim.devices.resets import DeviceResets
from virtshim.devices.unplug import UnplugDevices


@dataclass(frozen=True, slots=True)
class DeviceServices:
    claims: DeviceClaims
    borrowed: BorrowedDevices
    health: DeviceHealth
    resets: DeviceResets
    releases: DeviceReleases
    unplug: UnplugDevices
