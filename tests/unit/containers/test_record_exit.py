"""The way in which a VM ended decides the container's exit code and reason, which are written in one place."""

import itertools
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.journal import Crash, When
from fakes.world import World, sandbox_config

from virtshim.containers.record_exit import exit_of, trouble_of
from virtshim.devices.values import GrantedDevices, PciAddress, PciFunction
from virtshim.model.container import ContainerPhase, ExitReason
from virtshim.model.errors import Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason, PauseReason, Power, PowerState

OFF = Power.OFF
KEEP = {"virtshim.io/root-disk": "pod"}


def goes_off(world: World, domain: uuid.UUID) -> None:
    """libvirt has still to notice."""
    world.outside.vms.lingering.add(domain)
    world.outside.vms.end(domain, OffReason.SHUTDOWN)


def panics(world: World, domain: uuid.UUID) -> None:
    world.outside.vms.panic(domain)


@pytest.mark.parametrize(
    ("state", "code", "reason", "says"),
    [
        (PowerState(OFF, OffReason.SHUTDOWN), 0, ExitReason.COMPLETED, ""),
        (PowerState(OFF, OffReason.CRASHED), 137, ExitReason.ERROR, "QEMU was killed or crashed"),
        (PowerState(Power.CRASHED), 1, ExitReason.ERROR, "the guest panicked"),
        (PowerState(OFF, OffReason.DESTROYED), 137, ExitReason.ERROR, "externally"),
        (PowerState(OFF, OffReason.FAILED), 137, ExitReason.ERROR, "QEMU ended unexpectedly"),
        (PowerState(OFF, OffReason.UNKNOWN), 255, ExitReason.UNKNOWN, "for an unknown reason"),
        (PowerState(Power.ABSENT), 255, ExitReason.UNKNOWN, "gone from libvirt"),
    ],
)
def test_the_way_a_vm_ended_decides_code_and_reason(
    state: PowerState, code: int, reason: ExitReason, says: str
) -> None:
    ended = exit_of(state, 17)
    assert (ended.code, ended.reason, ended.finished_at) == (code, reason, 17)
    assert says in ended.message


@pytest.mark.parametrize("reason", list(OffReason))
@pytest.mark.parametrize("power", [Power.OFF, Power.CRASHED, Power.ABSENT])
def test_every_off_state_gives_an_exit(power: Power, reason: OffReason) -> None:
    ended = exit_of(PowerState(power, reason), 1)
    assert (ended.code == 0) == (ended.reason is ExitReason.COMPLETED)


def test_the_exit_message_is_the_reason_that_virtshim_gave_for_ending_the_vm() -> None:
    assert exit_of(PowerState(OFF, OffReason.DESTROYED), 1, "killed: no grace period").message == (
        "killed: no grace period"
    )


def test_only_a_kill_for_memory_is_reported_as_oom() -> None:
    killed = exit_of(PowerState(OFF, OffReason.CRASHED), 1, oom_killed=True)
    assert (killed.code, killed.reason) == (137, ExitReason.OOM_KILLED)
    for reason in (OffReason.SHUTDOWN, OffReason.DESTROYED):
        assert exit_of(PowerState(OFF, reason), 1, oom_killed=True) == exit_of(PowerState(OFF, reason), 1)


@pytest.mark.parametrize("power", [Power.RUNNING, Power.SHUTTING_DOWN, Power.OFF, Power.CRASHED])
def test_only_a_paused_vm_is_in_trouble(power: Power) -> None:
    nothing = GrantedDevices()
    assert trouble_of(PowerState(power), nothing) is None
    for why in (PauseReason.IO_ERROR, PauseReason.OTHER):
        trouble = trouble_of(PowerState(Power.PAUSED, pause=why), nothing)
        assert trouble is not None
        assert trouble.kind.stops_the_vm
        assert "paused" in trouble.text


def test_a_pause_of_a_vm_with_a_pci_device_may_be_that_devices_fault() -> None:
    granted = GrantedDevices(passthrough=(PciFunction(PciAddress.parse("0000:3b:00.1")),))
    paused = PowerState(Power.PAUSED, pause=PauseReason.OTHER)
    with_device, without = trouble_of(paused, granted), trouble_of(paused, GrantedDevices())
    assert with_device is not None
    assert without is not None
    assert "or by QEMU after a PCI device error" in with_device.text
    assert "device" not in without.text


def test_a_panic_ends_qemu_and_the_container(world: World) -> None:
    _, container = world.running()
    world.outside.vms.panic(world.domain(container))
    world.outside.vms.deliver()
    ended = world.container(container)
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.reason) == (1, ExitReason.ERROR)
    assert "the guest panicked" in ended.exit.message
    assert world.outside.vms.running() == []
    world.outside.vms.deliver()  # the event of its end by us
    assert world.container(container) == ended


def test_a_panic_while_nobody_watched_is_recorded_at_the_next_start(world: World) -> None:
    _, container = world.running()
    world.outside.vms.panic(world.domain(container))
    after = world.recovered()
    ended = after.container(container).exit
    assert ended is not None
    assert ended.code == 1
    assert after.outside.vms.running() == []
    after.close()


@pytest.mark.parametrize(("killed", "reason"), [(True, ExitReason.OOM_KILLED), (False, ExitReason.ERROR)])
def test_a_qemu_killed_for_memory_is_distinguished_from_a_crashed_qemu(
    world: World, killed: bool, reason: ExitReason
) -> None:
    _, container = world.running()
    if killed:
        world.outside.cgroups.killed.add(container)
    world.outside.vms.crash(world.domain(container))
    world.outside.vms.deliver()
    ended = world.container(container).exit
    assert ended is not None
    assert (ended.code, ended.reason) == (137, reason)


def test_a_full_disk_is_reported_while_the_container_stays_running(world: World) -> None:
    _, container = world.running()
    world.outside.vms.halt(world.domain(container))
    world.outside.vms.deliver()
    paused = world.container(container)
    assert paused.phase is ContainerPhase.RUNNING
    assert "file system is full" in paused.status.trouble
    world.outside.vms.resume(world.domain(container))
    world.outside.vms.deliver()
    assert world.container(container).status.trouble == ""


def test_a_container_whose_vm_is_on_is_not_settled(world: World) -> None:
    _, container = world.running()
    settled = world.app.events.exits.record_if_ended(container)
    assert settled is not None
    assert settled.phase is ContainerPhase.RUNNING


def test_a_container_that_is_gone_settles_to_nothing(world: World) -> None:
    assert world.app.events.exits.record_if_ended(ContainerId("1" * 64)) is None


def test_an_unreadable_state_is_no_end(world: World) -> None:
    _, container = world.running()
    world.journal.fail("vms.power", Unavailable("libvirt is gone"))
    with pytest.raises(Unavailable):
        world.app.events.exits.record_if_ended(container)
    assert world.container(container).phase is ContainerPhase.RUNNING


# --- why we ended a VM


def announced(world: World) -> dict[ContainerId, str]:
    return world.app.events.exits.kill_reasons


def test_an_announced_kill_is_forgotten_once_the_end_is_recorded(world: World) -> None:
    _, container = world.running()
    world.stop(container)
    ended = world.container(container).exit
    assert ended is not None
    assert ended.message == "killed: no grace period"
    assert announced(world) == {}


def test_a_vm_that_is_still_on_ends_with_the_announced_reason(world: World) -> None:
    _, container = world.running()
    exits = world.app.events.exits
    exits.note_kill(container, "killed: by a test")
    exits.record_if_ended(container)
    world.outside.vms.end(world.domain(container), OffReason.DESTROYED)
    world.outside.vms.deliver()
    ended = world.container(container).exit
    assert ended is not None
    assert ended.message == "killed: by a test"
    assert announced(world) == {}


def test_an_announcement_that_comes_too_late_is_forgotten(world: World) -> None:
    _, ended = world.running("ended")
    world.stop(ended)
    gone = ContainerId("1" * 64)
    for container in (ended, gone):
        world.app.events.exits.note_kill(container, "killed: too late")
        world.app.events.exits.record_if_ended(container)
    assert announced(world) == {}


# --- power events


@pytest.mark.parametrize(
    ("reason", "code"), [(OffReason.SHUTDOWN, 0), (OffReason.CRASHED, 137), (OffReason.FAILED, 137)]
)
def test_a_vm_that_ends_by_itself_is_recorded_by_its_event(world: World, reason: OffReason, code: int) -> None:
    _, container = world.running()
    world.outside.vms.end(world.domain(container), reason)
    world.outside.vms.deliver()
    ended = world.container(container)
    assert ended.exit is not None
    assert ended.exit.code == code
    assert world.outside.consoles.following == {}


def test_an_event_is_only_a_hint_and_the_vms_state_decides(world: World) -> None:
    _, container = world.running()
    world.app.events.changed(world.domain(container))
    assert world.container(container).phase is ContainerPhase.RUNNING


def test_an_event_of_a_foreign_domain_is_ignored(world: World) -> None:
    world.running()
    world.journal.calls.clear()
    world.app.events.changed(uuid.uuid4())
    assert world.journal.calls == []


def test_an_event_that_cannot_be_followed_up_does_not_end_the_event_thread(world: World) -> None:
    _, container = world.running()
    world.outside.vms.deliver()
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.journal.fail("vms.power", Unavailable("libvirt is gone"))
    world.outside.vms.deliver()
    assert world.container(container).phase is ContainerPhase.RUNNING
    world.app.events.changed(world.domain(container))
    assert world.container(container).phase is ContainerPhase.EXITED


def test_a_second_event_does_not_change_the_recorded_end(world: World) -> None:
    _, container = world.running()
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.outside.vms.deliver()
    first = world.container(container)
    world.outside.clock.advance(10)
    world.app.events.changed(world.domain(container))
    assert world.container(container) == first


@pytest.mark.parametrize("when", list(When), ids=lambda when: when.value)
@pytest.mark.parametrize("annotations", [{}, KEEP], ids=["own disk", "kept disk"])
@pytest.mark.parametrize(("ends", "code"), [(goes_off, 0), (panics, 1)])
def test_a_kill_during_the_recording_of_an_end_does_not_change_that_end(
    tmp_path: Path, ends: Callable[[World, uuid.UUID], None], code: int, annotations: dict[str, str], when: When
) -> None:
    for step in itertools.count(1):
        (tmp_path / str(step)).mkdir()
        world = World(tmp_path / str(step))
        world.pull()
        container = world.create(world.run(config=sandbox_config(annotations=annotations)))
        world.start(container)
        ends(world, world.domain(container))
        world.journal.crash(step, when)
        try:
            world.deliver()
        except Crash:
            where = f"died {when.value} {world.journal.calls[-1]}"
            world = world.recovered()
            ended = world.container(container).exit
            assert ended is not None, where
            assert ended.code == code, where
            world.close()
        else:  # that was all of it
            assert step > 2
            world.close()
            return


def test_an_end_that_is_recorded_late_is_recorded_unchanged(world: World) -> None:
    container = world.create(world.run(config=sandbox_config(annotations=KEEP)))
    world.start(container)
    goes_off(world, world.domain(container))
    world.journal.fail("vms.destroy", Unavailable("libvirt is gone"), after=True)
    world.deliver()
    world.app.events.exits.record_if_ended(container)
    assert world.journal.count("vms.destroy") > 1, "it was tried again"
    ended = world.container(container).exit
    assert ended is not None
    assert (ended.code, ended.reason) == (0, ExitReason.COMPLETED)


def test_a_vm_that_ended_just_before_its_pod_was_stopped_is_not_reported_as_killed(world: World) -> None:
    sandbox, container = world.running()
    goes_off(world, world.domain(container))
    world.stop_sandbox(sandbox)
    ended = world.container(container).exit
    assert ended is not None
    assert (ended.code, ended.message) == (0, "")
