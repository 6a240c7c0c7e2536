"""Device errors are reported when they occur, and functions are reset while their container still holds them."""

import pytest
import structlog
from fakes.world import World, container_config

from virtshim.config.settings import Devices
from virtshim.devices.values import CriDevice, DeviceErrors
from virtshim.metrics.family import of_container, of_pod
from virtshim.metrics.vm_metrics import DEVICES_OF_CONTAINER, DEVICES_OF_POD
from virtshim.model.errors import InternalError
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason

NODE, ADDRESS = "/dev/vfio/7", "0000:3b:00.0"
WITH_DEVICE = container_config(devices=(CriDevice(NODE, NODE),))


@pytest.fixture
def world(world: World) -> World:
    world.outside.devices.add_function(NODE, ADDRESS)
    return world


def running(world: World) -> ContainerId:
    container = world.create(world.run(), config=WITH_DEVICE)
    world.start(container)
    return container


def told(world: World) -> list[tuple[int, int]]:
    """Fatal and nonfatal errors that one round tells of."""
    with structlog.testing.capture_logs() as logs:
        world.app.watch.look()
    return [(line["fatal"], line["nonfatal"]) for line in logs if line["event"] == "device.errors"]


def count(world: World, fatal: int, nonfatal: int) -> None:
    world.outside.device_errors.counts[ADDRESS] = DeviceErrors(fatal, nonfatal)


def test_errors_are_reported_once_when_they_occur(world: World) -> None:
    running(world)
    count(world, 1, 5)
    assert told(world) == []
    count(world, 1, 7)
    assert told(world) == [(0, 2)]
    assert told(world) == []
    count(world, 2, 7)
    assert told(world) == [(1, 0)]


def test_a_device_without_kernel_counters_is_skipped(world: World) -> None:
    running(world)
    assert told(world) == []


def test_the_metrics_are_per_device(world: World) -> None:
    container = running(world)
    count(world, 1, 5)
    (use,) = world.do.usage.containers([world.container(container)])
    sandbox = world.sandbox(use.container.sandbox_id)
    measured = of_container(DEVICES_OF_CONTAINER, sandbox, use)
    assert [(one.name, one.labels[-1], one.value) for one in measured] == [
        ("virtshim_device_fatal_errors_total", ADDRESS, 1),
        ("virtshim_device_nonfatal_errors_total", ADDRESS, 5),
    ]


def test_a_vm_without_devices_has_one_sample_of_no_errors(world: World) -> None:
    container = world.create(world.run())
    world.start(container)
    (use,) = world.do.usage.containers([world.container(container)])
    measured = of_container(DEVICES_OF_CONTAINER, world.sandbox(use.container.sandbox_id), use)
    assert {(one.labels[-1], one.value) for one in measured} == {("", 0)}


def of_the_pod(world: World, container: ContainerId) -> dict[tuple[str, ...], int]:
    (use,) = world.do.usage.sandboxes([world.sandbox(world.container(container).sandbox_id)])
    return {(one.name, *one.labels[6:]): one.value for one in of_pod(DEVICES_OF_POD, use)}


def test_a_pod_shows_the_resets_of_its_devices_after_its_vm_has_ended(world: World) -> None:
    container = running(world)
    assert of_the_pod(world, container) == {
        ("virtshim_device_resets_total", ADDRESS, "done"): 0,
        ("virtshim_device_resets_total", ADDRESS, "failed"): 0,
        ("virtshim_device_resets_total", ADDRESS, "impossible"): 0,
        ("virtshim_device_broken", ADDRESS): 0,
    }
    world.journal.fail("drivers.reset", InternalError("no"))
    world.stop(container)
    after = of_the_pod(world, container)
    assert after["virtshim_device_resets_total", ADDRESS, "failed"] == 1
    assert after["virtshim_device_broken", ADDRESS] == 1


def test_fatal_errors_are_in_the_status_of_a_running_container_and_in_its_exit(world: World) -> None:
    container = running(world)
    count(world, 2, 0)
    world.app.watch.look()
    assert world.container(container).status.trouble == ""
    count(world, 3, 9)
    world.app.watch.look()
    words = f"device {ADDRESS} has had 1 fatal PCI Express error since the container was started"
    assert world.container(container).status.trouble == words
    world.stop(container)
    how = world.container(container).exit
    assert how is not None
    assert how.message == f"killed: no grace period; {words}"


def test_the_exit_of_a_guest_that_shut_down_well_still_reports_a_failed_reset(world: World) -> None:
    container = running(world)
    world.journal.fail("drivers.reset", InternalError("it did not come out of it"))
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.deliver()
    how = world.container(container).exit
    assert how is not None
    assert (how.code, how.message) == (0, f"device {ADDRESS} could not be reset: it did not come out of it")


def test_resets_by_virtshim_can_be_switched_off(world: World) -> None:
    world.sections["devices"] = Devices(reset=False)
    again = world.recovered()
    again.stop(running(again))
    assert again.outside.drivers.resets == []
    again.close()


def test_a_function_is_reset_before_others_can_have_it(world: World) -> None:
    container = running(world)
    world.journal.calls.clear()
    world.stop(container)
    calls = world.journal.calls
    last = len(calls) - 1 - calls[::-1].index("records.containers.replace")
    assert calls.index("drivers.reset") < last
    assert world.outside.drivers.resets == [ADDRESS]
    assert world.container(container).claims == ()


def test_a_function_that_cannot_be_reset_is_reported_and_still_given_to_others(world: World) -> None:
    container = running(world)
    world.outside.drivers.no_reset.add(ADDRESS)
    with structlog.testing.capture_logs() as logs:
        world.stop(container)
    assert "device.no_reset" in [line["event"] for line in logs]
    assert world.create(world.run("next"), config=WITH_DEVICE)
