"""libvirt's states and reasons say whether a VM runs."""

from __future__ import annotations

import libvirt
import pytest

from virtshim.model.vm import OffReason, PauseReason, Power, PowerState
from virtshim.vm.power import to_power


@pytest.mark.parametrize(
    ("state", "reason", "power"),
    [
        (libvirt.VIR_DOMAIN_RUNNING, 1, PowerState(Power.RUNNING)),
        (libvirt.VIR_DOMAIN_BLOCKED, 0, PowerState(Power.RUNNING)),
        (
            libvirt.VIR_DOMAIN_PAUSED,
            libvirt.VIR_DOMAIN_PAUSED_IOERROR,
            PowerState(Power.PAUSED, pause=PauseReason.IO_ERROR),
        ),
        (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_USER, PowerState(Power.PAUSED)),
        (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_CRASHED, PowerState(Power.CRASHED)),
        (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_SHUTTING_DOWN, PowerState(Power.SHUTTING_DOWN)),
        (libvirt.VIR_DOMAIN_PMSUSPENDED, 0, PowerState(Power.PAUSED, pause=PauseReason.GUEST)),
        (libvirt.VIR_DOMAIN_SHUTDOWN, 1, PowerState(Power.SHUTTING_DOWN)),
        (libvirt.VIR_DOMAIN_CRASHED, 1, PowerState(Power.CRASHED)),
        (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_SHUTDOWN, PowerState(Power.OFF, OffReason.SHUTDOWN)),
        (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_DESTROYED, PowerState(Power.OFF, OffReason.DESTROYED)),
        (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_CRASHED, PowerState(Power.OFF, OffReason.CRASHED)),
        (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_FAILED, PowerState(Power.OFF, OffReason.FAILED)),
        (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_DAEMON, PowerState(Power.OFF)),
    ],
)
def test_libvirts_state_and_reason_say_whether_a_vm_runs(state: int, reason: int, power: PowerState) -> None:
    assert to_power(state, reason) == power


@pytest.mark.parametrize("state", [libvirt.VIR_DOMAIN_NOSTATE, 4711])
def test_an_unknown_state_is_never_taken_for_off(state: int) -> None:
    assert to_power(state, 0).is_on
