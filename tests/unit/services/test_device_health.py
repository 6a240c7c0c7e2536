"""Errors of devices are told when they come; functions are reset while they are still their container's."""

import pytest
import structlog
from fakes.world import World, container_config

from virtshim.config import Devices
from virtshim.domain.devices import CriDevice, DeviceErrors, PciAddress
from virtshim.domain.errors import InternalError
from virtshim.domain.ids import ContainerId
from virtshim.domain.vm import OffReason
from virtshim.services import device_metrics
from virtshim.services.metric_family import of_container

NODE, ADDRESS = "/dev/vfio/7", "0000:3b:00.0"


@pytest.fixture
def world(world: World) -> World:
    world.outside.devices.add_function(NODE, ADDRESS)
    return world


def running(world: World) -> ContainerId:
    config = container_config(devices=(CriDevice(NODE, NODE),))
    container = world.create(world.run(), config=config)
    world.start(container)
    return container


def told(world: World) -> list[tuple[int, int]]:
    """Fatal and nonfatal errors that one round tells of."""
    with structlog.testing.capture_logs() as logs:
        world.app.watch.look()
    return [(line["fatal"], line["nonfatal"]) for line in logs if line["event"] == "device.errors"]


def count(world: World, fatal: int, nonfatal: int) -> None:
    world.outside.device_errors.counts[ADDRESS] = DeviceErrors(fatal, nonfatal)


def test_errors_are_told_when_they_come_and_once(world: World) -> None:
    running(world)
    count(world, 1, 5)
    assert told(world) == []
    count(world, 1, 7)
    assert told(world) == [(0, 2)]
    assert told(world) == []
    count(world, 2, 7)
    assert told(world) == [(1, 0)]


def test_a_device_that_the_kernel_counts_nothing_of_is_passed_over(world: World) -> None:
    running(world)
    assert told(world) == []


def test_the_metrics_are_by_device(world: World) -> None:
    container = running(world)
    count(world, 1, 5)
    (use,) = world.do.usage.containers([world.container(container)])
    assert use.device_errors == {PciAddress.parse(ADDRESS): DeviceErrors(1, 5)}
    sandbox = world.sandbox(use.container.sandbox_id)
    measured = of_container(device_metrics.CONTAINER, sandbox, use)
    assert [(one.name, one.labels[-1], one.value) for one in measured] == [
        ("virtshim_device_fatal_errors_total", ADDRESS, 1),
        ("virtshim_device_nonfatal_errors_total", ADDRESS, 5),
    ]


def test_a_vm_without_devices_has_one_sample_of_no_errors(world: World) -> None:
    container = world.create(world.run())
    world.start(container)
    (use,) = world.do.usage.containers([world.container(container)])
    measured = of_container(device_metrics.CONTAINER, world.sandbox(use.container.sandbox_id), use)
    assert {(one.labels[-1], one.value) for one in measured} == {("", 0)}


def resetting(world: World) -> World:
    world.sections["devices"] = Devices(reset=True)
    return world.recovered()


def test_by_default_the_kernel_alone_resets(world: World) -> None:
    container = running(world)
    world.stop(container)
    assert world.outside.drivers.resets == []


def test_a_function_is_reset_before_others_can_have_it(world: World) -> None:
    again = resetting(world)
    container = running(again)
    again.journal.calls.clear()
    again.stop(container)
    calls = again.journal.calls
    last = len(calls) - 1 - calls[::-1].index("records.containers.replace")
    assert calls.index("drivers.reset") < last
    assert again.outside.drivers.resets == [ADDRESS]
    assert again.container(container).claims == ()
    again.close()


def test_a_reset_that_fails_does_not_keep_the_end_from_being_told(world: World) -> None:
    again = resetting(world)
    container = running(again)
    again.journal.fail("drivers.reset", InternalError("no"))
    with structlog.testing.capture_logs() as logs:
        again.outside.vms.end(again.domain(container), OffReason.SHUTDOWN)
        again.outside.vms.deliver()
    assert "device.reset_failed" in [line["event"] for line in logs]
    assert again.container(container).exit is not None
    again.close()


def test_a_function_that_cannot_be_reset_is_told_of(world: World) -> None:
    again = resetting(world)
    container = running(again)
    again.outside.drivers.no_reset.add(ADDRESS)
    with structlog.testing.capture_logs() as logs:
        again.stop(container)
    assert "device.no_reset" in [line["event"] for line in logs]
    again.close()
