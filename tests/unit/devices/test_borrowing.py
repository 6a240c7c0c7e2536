"""PCI functions that virtshim takes from their drivers come back, whatever happens in between."""

import sqlite3
import threading

import pytest
from fakes.world import World, container_config

from virtshim.config.settings import Devices
from virtshim.devices.values import CriDevice
from virtshim.model.container import ContainerConfig
from virtshim.model.errors import DeadlineExceeded, InternalError, WrongState
from virtshim.model.ids import ContainerId

NODE, ADDRESS = "/dev/vfio/7", "0000:3b:00.1"


@pytest.fixture
def world(world: World) -> World:
    world.outside.devices.add_function(NODE, ADDRESS)
    world.outside.drivers.drivers[ADDRESS] = "iavf"
    return world


def with_device() -> ContainerConfig:
    return container_config(devices=(CriDevice(NODE, NODE),))


def make(world: World, pod: str = "web", attempt: int = 0) -> ContainerId:
    return world.create(world.run(pod), attempt=attempt, config=with_device())


def driver(world: World) -> str:
    return world.outside.drivers.drivers[ADDRESS]


def test_a_function_is_bound_to_vfio_while_a_container_has_it(world: World) -> None:
    container = make(world)
    assert driver(world) == "vfio-pci"
    world.remove(container)
    assert driver(world) == "iavf"
    assert world.records.borrowed.all() == []


def test_a_function_without_a_driver_has_none_again_afterwards(world: World) -> None:
    world.outside.drivers.drivers[ADDRESS] = ""
    world.remove(make(world))
    assert driver(world) == ""


@pytest.mark.parametrize("bound", ["vfio-pci", "mlx5_vfio_pci"])
def test_a_function_that_a_plugin_has_bound_keeps_its_driver(world: World, bound: str) -> None:
    world.outside.drivers.drivers[ADDRESS] = bound
    container = make(world)
    assert world.records.borrowed.all() == []
    world.remove(container)
    assert driver(world) == bound


def test_the_record_is_written_before_the_driver_changes(world: World) -> None:
    sandbox = world.run()
    world.journal.calls.clear()
    world.create(sandbox, config=with_device())
    calls = world.journal.calls
    assert calls.index("records.containers.add") < calls.index("records.borrowed.add") < calls.index("drivers.bind")
    assert calls.index("drivers.bind") < calls.index("vms.define")


def test_a_failed_create_gives_the_function_back(world: World) -> None:
    world.journal.fail("vms.define", InternalError("no"))
    with pytest.raises(InternalError):
        make(world)
    assert driver(world) == "iavf"


def test_a_failed_bind_leaves_no_container(world: World) -> None:
    world.outside.drivers.broken.add("vfio-pci")
    with pytest.raises(InternalError, match="did not take"):
        make(world)
    assert world.records.containers.all() == []
    assert driver(world) == "iavf"


def test_the_original_driver_is_remembered_over_later_attempts_and_pods(world: World) -> None:
    first = make(world)
    world.start(first)
    world.stop(first)
    second = make(world, attempt=1)
    world.remove(first)
    assert driver(world) == "vfio-pci"
    world.start(second)
    world.stop(second)
    third = make(world, "other")
    world.remove(second)
    assert driver(world) == "vfio-pci"
    world.remove(third)
    assert driver(world) == "iavf"


def test_a_function_that_could_not_be_given_back_is_tried_again_at_the_next_start(world: World) -> None:
    container = make(world)
    world.outside.drivers.broken.add("iavf")
    world.remove(container)
    assert driver(world) == "vfio-pci"
    world.outside.drivers.broken.clear()
    again = world.recovered()
    assert driver(again) == "iavf"
    again.close()


def test_an_unplugged_function_is_forgotten(world: World) -> None:
    container = make(world)
    world.outside.drivers.gone.add(ADDRESS)
    world.remove(container)
    assert world.records.borrowed.all() == []


def test_without_devices_bind_no_function_is_taken_and_taken_functions_come_back(world: World) -> None:
    make(world)
    world.sections["devices"] = Devices(bind=False)
    again = world.recovered()
    again.remove_sandbox(again.records.sandboxes.all()[0].id)
    assert driver(again) == "iavf"
    make(again, "other")
    assert driver(again) == "iavf"
    again.close()


def with_its_record_spoilt(world: World, container: ContainerId) -> World:
    """The next daemon cannot read it, and has started."""
    world.close()
    with sqlite3.connect(world.directory / "state.db") as database:
        database.execute("update containers set document = '[{}]' where id = ?", (container.value,))
        database.execute("insert into node values ('boot', 'this one')")
    database.close()
    return world.recovered()


@pytest.mark.parametrize("definition", ["without a record", "unreadable"])
def test_a_running_vm_keeps_its_function_when_its_record_is_lost(world: World, definition: str) -> None:
    container = make(world)
    world.start(container)
    domain = world.outside.vms.domains[world.domain(container)]
    if definition == "unreadable":
        world.outside.vms.unreadable.add(domain.name)
    else:
        world.outside.disks.directories[container].discard("record.json")
    again = with_its_record_spoilt(world, container)
    assert driver(again) == "vfio-pci"
    with pytest.raises(WrongState, match="held by container vm"):
        make(again, "other")
    world.outside.vms.unreadable.clear()
    again.remove(container)
    assert driver(again) == "iavf"
    again.close()


def test_the_reconciler_gives_back_functions_that_could_not_be_given_back_at_once(world: World) -> None:
    container = make(world)
    world.outside.drivers.broken.add("iavf")
    world.remove(container)
    world.outside.drivers.broken.clear()
    for _ in range(2):
        world.app.recovery.reconcile.look()
        world.outside.clock.advance(61)
    assert driver(world) == "iavf"
    assert world.records.borrowed.all() == []


def test_a_driver_that_hangs_holds_up_neither_other_pods_nor_the_next_removal(world: World) -> None:
    world.outside.devices.add_function("/dev/vfio/8", "0000:3b:00.2")
    world.outside.drivers.drivers["0000:3b:00.2"] = "iavf"
    first = make(world)
    gate = world.journal.hold("drivers.bind")
    removal = threading.Thread(target=world.remove, args=(first,))
    removal.start()
    gate.wait()
    other = world.create(
        world.run("other"), config=container_config(devices=(CriDevice("/dev/vfio/8", "/dev/vfio/8"),))
    )
    world.remove(other)
    assert world.outside.drivers.drivers["0000:3b:00.2"] == "iavf"
    gate.open()
    removal.join()
    assert driver(world) == "iavf"


def test_a_removal_waits_for_only_one_of_several_hanging_functions(world: World) -> None:
    world.outside.devices.add_function(NODE, "0000:3b:00.2")
    world.outside.drivers.drivers["0000:3b:00.2"] = "iavf"
    container = make(world)
    world.journal.calls.clear()
    world.journal.fail("drivers.bind", DeadlineExceeded("tapmanager did not answer"), times=2)
    world.remove(container)
    assert world.journal.count("drivers.bind") == 1
    assert len(world.records.borrowed.all()) == 2
