"""A guest releases the host's devices before its VM is ended by force, and only then."""

from functools import partial
from pathlib import Path

import pytest
import structlog
from fakes.background import Background
from fakes.journal import WAIT_LIMIT, Crash, When
from fakes.world import World, container_config
from podclient import wait_until

from virtshim.config.settings import Devices
from virtshim.devices.values import CriDevice, UsbDevice
from virtshim.model.container import ContainerPhase, ExitReason
from virtshim.model.errors import ResourceExhausted, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import PauseReason

NODE = "/dev/vfio/7"


@pytest.fixture
def world(world: World) -> World:
    world.outside.devices.add_function(NODE, "0000:3b:00.1")
    return world


def running(world: World, node: str = NODE) -> ContainerId:
    container = world.create(world.run(), config=container_config(devices=(CriDevice(node, node),)))
    world.start(container)
    world.outside.vms.shuts_down_after = None
    world.journal.calls.clear()
    return container


def ends(world: World) -> list[str]:
    """What was done to the VM, in order."""
    return [call for call in world.journal.calls if call in ("vms.unplug", "vms.destroy")]


def test_after_the_grace_period_devices_are_unplugged_before_the_vm_is_destroyed(world: World) -> None:
    container = running(world)
    world.stop(container, 30)
    assert ends(world) == ["vms.unplug", "vms.destroy"]
    how = world.container(container).exit
    assert how is not None
    assert (how.code, how.reason) == (137, ExitReason.ERROR)
    assert how.message == "killed: the guest did not shut down within 30 s"


def test_without_grace_devices_are_unplugged_too(world: World) -> None:
    world.stop(running(world), 0)
    assert ends(world) == ["vms.unplug", "vms.destroy"]


def test_a_guest_that_shuts_down_keeps_its_devices_until_it_is_off(world: World) -> None:
    container = running(world)
    world.outside.vms.shuts_down_after = 20.0
    world.stop(container, 30)
    assert ends(world) == []


def test_stopping_a_pod_or_removing_a_container_unplugs_devices_first(world: World) -> None:
    container = running(world)
    world.stop_sandbox(world.container(container).sandbox_id)
    assert ends(world) == ["vms.unplug", "vms.destroy"]
    second = world.create(world.run("other"), config=container_config(devices=(CriDevice(NODE, NODE),)))
    world.start(second)
    world.journal.calls.clear()
    world.remove(second)
    assert ends(world)[:2] == ["vms.unplug", "vms.destroy"]


def test_a_removed_container_leaves_its_devices_reset(world: World) -> None:
    container = running(world)
    world.remove(container)
    calls = world.journal.calls
    assert calls.index("vms.destroy") < calls.index("drivers.reset") < calls.index("records.containers.delete")


def test_a_guest_that_does_not_release_its_devices_is_destroyed_anyway(world: World) -> None:
    container = running(world)
    world.outside.vms.keeps_devices.add(world.domain(container))
    with structlog.testing.capture_logs() as logs:
        world.stop(container, 0)
    (line,) = [line for line in logs if line["event"] == "vm.unplugged"]
    assert line["kept_by_guest"] == ["ua-host-pci1"]
    assert world.container(container).phase is ContainerPhase.EXITED


@pytest.mark.parametrize("call", ["vms.unplug", "records.containers.replace"])
def test_a_failed_unplug_does_not_keep_the_vm_from_being_destroyed(world: World, call: str) -> None:
    container = running(world)
    error = Unavailable("libvirt is away") if call == "vms.unplug" else ResourceExhausted("disk full")
    world.journal.fail(call, error)
    world.stop(container, 0)
    assert world.container(container).phase is ContainerPhase.EXITED
    assert ("vms.unplug" in ends(world)) == (call == "vms.unplug"), "nothing is begun that is not written down"


def test_usb_devices_and_vms_without_devices_are_not_unplugged(world: World) -> None:
    world.outside.devices.nodes["/dev/bus/usb/001/002"] = (UsbDevice(1, 2),)
    world.stop(running(world, "/dev/bus/usb/001/002"), 0)
    assert ends(world) == ["vms.destroy"]


def test_unplugging_can_be_turned_off(world: World) -> None:
    world.sections["devices"] = Devices(unplug=0)
    again = world.recovered()
    again.stop(running(again), 0)
    assert ends(again) == ["vms.destroy"]
    again.close()


def test_unplugging_does_not_wait_for_a_pod_that_another_call_has_locked(world: World) -> None:
    container = running(world)
    world.sections["devices"] = Devices(unplug=0.01)
    again = world.recovered()
    other = again.journal.hold("vms.pause")
    background = Background(lambda: again.app.operator.services.actions.pause(again.container(container)))
    other.wait()
    again.journal.hold("vms.destroy").open()
    stopping = Background(lambda: again.do.stop_container.kill(again.container(container), "killed"))
    wait_until(lambda: again.journal.count("vms.destroy"), WAIT_LIMIT, "the VM is ended")
    other.open()
    with pytest.raises(WrongState, match="is not running"):
        background.done()
    stopping.done()
    assert ends(again) == ["vms.destroy"]
    again.close()


def test_a_paused_vm_is_destroyed_without_an_unplug(world: World) -> None:
    container = running(world)
    domain = world.domain(container)
    world.outside.vms.halt(domain, PauseReason.OTHER)
    world.stop(container, 0)
    assert world.outside.vms.domains[domain].plugged == ("ua-host-pci1",)
    assert world.container(container).phase is ContainerPhase.EXITED


def has_ended(world: World, container: ContainerId) -> bool:
    return world.container(container).phase is ContainerPhase.EXITED


def steps_of_a_stop(directory: Path) -> list[str]:
    world = with_function(directory)
    world.stop(running(world), 0)
    world.close()
    return world.journal.calls


def with_function(directory: Path) -> World:
    world = World(directory)
    world.pull()
    world.outside.devices.add_function(NODE, "0000:3b:00.1")
    return world


@pytest.mark.parametrize("when", list(When), ids=lambda when: when.value)
def test_a_vm_that_lost_its_devices_is_destroyed_even_after_a_crash_of_virtshim(when: When, tmp_path: Path) -> None:
    (tmp_path / "count").mkdir()
    steps = steps_of_a_stop(tmp_path / "count")
    assert "vms.unplug" in steps
    for step in range(1, len(steps) + 1):
        directory = tmp_path / str(step)
        directory.mkdir()
        world = with_function(directory)
        container = running(world)
        domain = world.domain(container)
        world.journal.crash(step, when)
        with pytest.raises(Crash):
            world.stop(container, 0)
        lost = not world.outside.vms.domains[domain].plugged

        world = world.recovered()
        if lost:
            wait_until(
                partial(has_ended, world, container),
                WAIT_LIMIT,
                f"died {when.value} {steps[step - 1]}: the VM ends although nobody asks again",
            )
        world.stop(container, 0)
        ended = world.container(container)
        assert ended.exit is not None
        assert ended.claims == ()
        assert not world.outside.vms.power(domain).is_on
        world.close()
