"""A USB device gets its drivers back when its VM has ended, while its container still holds it."""

import pytest
import structlog
from fakes.world import World, container_config

from virtshim.devices.values import CriDevice, UsbDevice
from virtshim.model.errors import Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason

STICK = UsbDevice(2, 5)
NODE = "/dev/bus/usb/002/005"


@pytest.fixture
def world(world: World) -> World:
    world.outside.devices.nodes[NODE] = (STICK,)
    world.outside.drivers.driverless[STICK.claim] = ["2-1:1.0"]
    return world


def killed(world: World) -> tuple[ContainerId, list[str]]:
    """A container whose QEMU was killed, and what the log says of its devices."""
    container = world.create(world.run(), config=container_config(devices=(CriDevice(NODE, NODE),)))
    world.start(container)
    world.journal.calls.clear()
    with structlog.testing.capture_logs() as logs:
        world.outside.vms.end(world.domain(container), OffReason.CRASHED)
        world.deliver()
    return container, [line["event"] for line in logs if line["event"].startswith("usb.")]


def test_a_usb_device_that_a_killed_qemu_left_driverless_gets_a_driver(world: World) -> None:
    container, told = killed(world)
    assert told == ["usb.given_back"]
    assert world.outside.drivers.driverless == {STICK.claim: []}
    calls = world.journal.calls
    last = len(calls) - 1 - calls[::-1].index("records.containers.replace")
    assert calls.index("drivers.probe_usb") < last
    assert world.container(container).claims == ()


def test_a_usb_device_with_its_drivers_is_not_logged(world: World) -> None:
    world.outside.drivers.driverless[STICK.claim] = []
    assert killed(world)[1] == []


def test_an_unplugged_usb_device_is_not_logged(world: World) -> None:
    world.outside.drivers.driverless.clear()
    container, told = killed(world)
    assert told == []
    assert world.container(container).exit is not None


def test_the_end_is_recorded_even_without_tapmanager(world: World) -> None:
    world.journal.fail("drivers.probe_usb", Unavailable("no"))
    container, told = killed(world)
    assert told == ["usb.not_given_back"]
    assert world.container(container).exit is not None
