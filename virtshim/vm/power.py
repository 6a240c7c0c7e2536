"""Turns libvirt's (state, reason) into a PowerState.

libvirt only remembers in memory why a domain is off. After a restart of libvirtd, or of the process with the embedded driver, the
reason is UNKNOWN.
"""

from __future__ import annotations

from typing import Final, cast

import libvirt

from virtshim.model.vm import OffReason, PauseReason, Power, PowerState

ABSENT: Final = PowerState(Power.ABSENT)

# NOSTATE means "unknown", which must never be taken for off.
_POWER: Final = {
    libvirt.VIR_DOMAIN_NOSTATE: Power.RUNNING,
    libvirt.VIR_DOMAIN_RUNNING: Power.RUNNING,
    libvirt.VIR_DOMAIN_BLOCKED: Power.RUNNING,
    libvirt.VIR_DOMAIN_PAUSED: Power.PAUSED,
    libvirt.VIR_DOMAIN_SHUTDOWN: Power.SHUTTING_DOWN,
    libvirt.VIR_DOMAIN_SHUTOFF: Power.OFF,
    # The guest panicked. `on_crash` is preserve, so QEMU stays until we end it: a domain that libvirt ended after a panic
    # would look like one whose QEMU was killed.
    libvirt.VIR_DOMAIN_CRASHED: Power.CRASHED,
    libvirt.VIR_DOMAIN_PMSUSPENDED: Power.PAUSED,
}

_OFF_REASON: Final = {
    libvirt.VIR_DOMAIN_SHUTOFF_SHUTDOWN: OffReason.SHUTDOWN,
    libvirt.VIR_DOMAIN_SHUTOFF_DESTROYED: OffReason.DESTROYED,
    libvirt.VIR_DOMAIN_SHUTOFF_CRASHED: OffReason.CRASHED,
    libvirt.VIR_DOMAIN_SHUTOFF_FAILED: OffReason.FAILED,
}

_PAUSED: Final = {
    libvirt.VIR_DOMAIN_PAUSED_SHUTTING_DOWN: PowerState(Power.SHUTTING_DOWN),
    libvirt.VIR_DOMAIN_PAUSED_IOERROR: PowerState(Power.PAUSED, pause=PauseReason.IO_ERROR),
    # libvirt reports this after its own restart, if QEMU's state is guest-panicked.
    libvirt.VIR_DOMAIN_PAUSED_CRASHED: PowerState(Power.CRASHED),
}


def to_power(state: int, reason: int) -> PowerState:
    power = _POWER.get(state, Power.RUNNING)
    if power is Power.OFF:
        return PowerState(power, _OFF_REASON.get(reason, OffReason.UNKNOWN))
    if state == libvirt.VIR_DOMAIN_PMSUSPENDED:
        return PowerState(power, pause=PauseReason.GUEST)
    if state == libvirt.VIR_DOMAIN_PAUSED:
        return _PAUSED.get(reason, PowerState(power))
    return PowerState(power)


def power_of(domain: libvirt.virDomain) -> PowerState:
    """Raises libvirtError."""
    state, reason = cast("list[int]", domain.state())  # libvirt-python's annotation says str
    return to_power(state, reason)
