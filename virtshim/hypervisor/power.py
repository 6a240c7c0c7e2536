"""libvirt's (state, reason) -> PowerState. The one table; pure.

Reasons of a domain that is off are kept by libvirt in memory: after libvirtd (or the process with the embedded
driver) was started again they are UNKNOWN.
"""

from __future__ import annotations

from typing import Final

import libvirt

from virtshim.domain.vm import OffReason, Power, PowerState

ABSENT: Final = PowerState(Power.ABSENT)

# NOSTATE: "cannot tell", which must never be taken for off.
_POWER: Final = {
    libvirt.VIR_DOMAIN_NOSTATE: Power.RUNNING,
    libvirt.VIR_DOMAIN_RUNNING: Power.RUNNING,
    libvirt.VIR_DOMAIN_BLOCKED: Power.RUNNING,
    libvirt.VIR_DOMAIN_PAUSED: Power.PAUSED,
    libvirt.VIR_DOMAIN_SHUTDOWN: Power.SHUTTING_DOWN,
    libvirt.VIR_DOMAIN_SHUTOFF: Power.OFF,
    # The guest panicked, and libvirt is about to end QEMU (`on_crash` is destroy): then it is OFF, reason CRASHED.
    libvirt.VIR_DOMAIN_CRASHED: Power.SHUTTING_DOWN,
    libvirt.VIR_DOMAIN_PMSUSPENDED: Power.PAUSED,
}

_OFF_REASON: Final = {
    libvirt.VIR_DOMAIN_SHUTOFF_SHUTDOWN: OffReason.SHUTDOWN,
    libvirt.VIR_DOMAIN_SHUTOFF_DESTROYED: OffReason.DESTROYED,
    libvirt.VIR_DOMAIN_SHUTOFF_CRASHED: OffReason.CRASHED,
    libvirt.VIR_DOMAIN_SHUTOFF_FAILED: OffReason.FAILED,
}


def to_power(state: int, reason: int) -> PowerState:
    power = _POWER.get(state, Power.RUNNING)
    if power is Power.OFF:
        return PowerState(power, _OFF_REASON.get(reason, OffReason.UNKNOWN))
    if state == libvirt.VIR_DOMAIN_CRASHED:
        return PowerState(power, OffReason.CRASHED)
    if (
        power is Power.PAUSED
        and state == libvirt.VIR_DOMAIN_PAUSED
        and reason == libvirt.VIR_DOMAIN_PAUSED_SHUTTING_DOWN
    ):
        return PowerState(Power.SHUTTING_DOWN)
    return PowerState(power)
