"""A function whose reset failed is given to no VM until a reset works."""

import pytest
import structlog
from fakes.background import Background
from fakes.world import World, container_config

from virtshim.devices.values import CriDevice, DeviceErrors
from virtshim.model.errors import DeadlineExceeded, InternalError, ResourceExhausted, ShimError, Unavailable, WrongState
from virtshim.model.ids import ContainerId

NODE, ADDRESS = "/dev/vfio/7", "0000:3b:00.0"
WITH_DEVICE = container_config(devices=(CriDevice(NODE, NODE),))
BROKEN = InternalError("it did not come out of it")


@pytest.fixture
def world(world: World) -> World:
    world.outside.devices.add_function(NODE, ADDRESS)
    return world


def ended(world: World, pod: str = "web", error: ShimError | None = None) -> ContainerId:
    """A VM that had the device is off; its reset failed with that."""
    container = world.create(world.run(pod), config=WITH_DEVICE)
    world.start(container)
    if error is not None:
        world.journal.fail("drivers.reset", error)
    world.stop(container)
    return container


def broken(world: World) -> list[str]:
    return list(world.do.node.facts()["brokenDevices"])  # type: ignore[call-overload]


@pytest.mark.parametrize("error", [BROKEN, DeadlineExceeded("not within 30 s"), Unavailable("tapmanager is away")])
def test_the_next_vm_does_not_get_a_device_whose_reset_fails(world: World, error: ShimError) -> None:
    ended(world, error=error)
    world.journal.fail("drivers.reset", BROKEN)
    sandbox = world.run("next")
    with pytest.raises(
        WrongState, match=r"could not be reset at 2027-01-15 .* UTC \(it did not come out of it\)"
    ) as refused:
        world.create(sandbox, config=WITH_DEVICE)
    assert f"echo 1 > /sys/bus/pci/devices/{ADDRESS}/reset" in str(refused.value)
    assert [c.phase.value for c in world.records.containers.all()] == ["exited"]
    assert world.create(sandbox, config=WITH_DEVICE), "the next reset works, and with it the device"
    assert broken(world) == []


def test_a_failed_reset_is_remembered_over_a_restart_of_virtshim(world: World) -> None:
    ended(world, error=BROKEN)
    again = world.recovered()
    assert broken(again) == [ADDRESS]
    again.close()


def test_a_reboot_of_the_node_clears_failed_resets(world: World) -> None:
    ended(world, error=BROKEN)
    again = world.recovered(rebooted=True)
    assert broken(again) == []
    again.close()


def test_a_failed_reset_is_retried_and_its_success_is_reported(world: World) -> None:
    ended(world, error=BROKEN)
    world.journal.fail("drivers.reset", BROKEN)
    world.app.recovery.reconcile.look()
    assert broken(world) == [ADDRESS]
    with structlog.testing.capture_logs() as logs:
        world.app.recovery.reconcile.look()
    assert "device.healed" in [line["event"] for line in logs]
    assert broken(world) == []
    before = world.journal.count("drivers.reset")
    world.app.recovery.reconcile.look()
    assert world.journal.count("drivers.reset") == before, "what is well is left alone"


def test_a_reset_that_hangs_holds_up_no_pod_with_another_device(world: World) -> None:
    ended(world, error=BROKEN)
    world.outside.devices.add_function("/dev/vfio/8", "0000:3b:00.2")
    gate = world.journal.hold("drivers.reset")
    look = Background(world.app.recovery.reconcile.look)
    gate.wait()
    config = container_config(devices=(CriDevice("/dev/vfio/8", "/dev/vfio/8"),))
    created = Background(lambda: world.create(world.run("other"), config=config))
    assert created.done()
    gate.open()
    look.done()
    assert broken(world) == []


def test_a_device_that_a_container_holds_is_not_reset_again(world: World) -> None:
    container = ended(world, error=BROKEN)
    holder = world.create(world.run("next"), config=container_config())
    taken = world.container(container).granted
    world.records.containers.replace(world.container(holder).with_claims(taken.claims))
    before = world.journal.count("drivers.reset")
    world.app.recovery.reconcile.look()
    assert world.journal.count("drivers.reset") == before


def test_an_unplugged_device_is_forgotten(world: World) -> None:
    ended(world, error=BROKEN)
    world.outside.drivers.gone.add(ADDRESS)
    world.app.recovery.reconcile.look()
    assert broken(world) == []


def test_a_reset_clears_earlier_fatal_errors(world: World) -> None:
    world.outside.device_errors.counts[ADDRESS] = DeviceErrors(4, 0)
    ended(world)
    (condition,) = world.records.device_conditions.all()
    assert (condition.fatal, condition.fault) == (4, "")
    assert ended(world, "next"), "it is fit for a VM"


def test_a_device_without_trouble_leaves_no_record(world: World) -> None:
    ended(world)
    assert world.records.device_conditions.all() == []


def test_a_vms_end_is_reported_even_if_the_failed_reset_cannot_be_recorded(world: World) -> None:
    world.journal.fail("records.device_conditions.put", ResourceExhausted("disk full"))
    container = ended(world, error=BROKEN)
    assert world.container(container).exit is not None
