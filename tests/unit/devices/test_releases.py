"""A VM's end is reported at once, and its devices are reset in the background before others can have them."""

from collections.abc import Iterator
from functools import partial

import pytest
from fakes.background import Background
from fakes.journal import WAIT_LIMIT, Crash
from fakes.world import World, container_config
from podclient import wait_until

from virtshim.devices.values import CriDevice
from virtshim.model.container import ContainerName, ContainerPhase
from virtshim.model.errors import InternalError, ResourceExhausted, Unavailable, WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.vm import OffReason
from virtshim.pods.events import EventType, Subscription
from virtshim.vm.events import Lifecycle

NODE, ADDRESS = "/dev/vfio/7", "0000:3b:00.0"
CLAIM = f"pci:{ADDRESS}"
WITH_DEVICE = container_config(devices=(CriDevice(NODE, NODE),))
OTHERS = 19


@pytest.fixture
def world(world: World) -> World:
    world.outside.devices.add_function(NODE, ADDRESS)
    return world


@pytest.fixture
def lifecycle(world: World) -> Iterator[Lifecycle]:
    """libvirt's events, as the daemon hears them."""
    lifecycle = Lifecycle(list)
    lifecycle.add_callback(world.app.events.changed)
    yield lifecycle
    lifecycle.close()


def with_device(world: World, pod: str = "web") -> ContainerId:
    container = world.create(world.run(pod), config=WITH_DEVICE)
    world.start(container)
    return container


def off(world: World, container: ContainerId) -> None:
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)


def stopped(changes: Subscription, count: int) -> set[str]:
    """The next containers that are told to have stopped."""
    found: set[str] = set()
    while len(found) < count:
        change = changes.next()
        assert change is not None
        if change.kind is EventType.STOPPED:
            found.add(change.id)
    return found


def sandbox_of(world: World, container: ContainerId) -> SandboxId:
    return world.container(container).sandbox_id


def is_free(world: World) -> bool:
    return not any(CLAIM in container.claims for container in world.records.containers.all())


def test_a_reset_that_hangs_delays_no_report_of_a_vms_end(world: World, lifecycle: Lifecycle) -> None:
    hung = with_device(world)
    others = [world.running(f"pod-{n}")[1] for n in range(OTHERS)]
    changes = world.app.services.events.subscribe()
    gate = world.journal.hold("drivers.reset")
    off(world, hung)
    lifecycle.happened(world.domain(hung))
    gate.wait()
    for container in others:
        off(world, container)
        lifecycle.happened(world.domain(container))
    told = Background(lambda: stopped(changes, 1 + OTHERS)).done()
    assert told == {container.value for container in (hung, *others)}
    assert not gate.opened.is_set()
    gate.open()


def test_a_vm_that_libvirt_does_not_answer_for_delays_no_other(world: World, lifecycle: Lifecycle) -> None:
    kept = with_device(world)
    others = [world.running(f"pod-{n}")[1] for n in range(OTHERS)]
    changes = world.app.services.events.subscribe()
    gate = world.journal.hold("vms.power")
    off(world, kept)
    lifecycle.happened(world.domain(kept))
    gate.wait()
    for container in others:
        off(world, container)
        lifecycle.happened(world.domain(container))
    assert Background(lambda: stopped(changes, OTHERS)).done() == {container.value for container in others}
    gate.open()


def test_the_pod_can_be_worked_with_while_its_device_is_reset(world: World) -> None:
    container = with_device(world)
    gate = world.journal.hold("drivers.reset")
    stop = Background(lambda: world.stop(container))
    gate.wait()
    assert world.container(container).phase is ContainerPhase.EXITED
    assert Background(lambda: world.create(sandbox_of(world, container), attempt=1)).done()
    gate.open()
    stop.done()


def test_a_stop_and_its_repeat_return_when_the_device_is_free(world: World) -> None:
    container = with_device(world)
    gate = world.journal.hold("drivers.reset")
    off(world, container)
    world.outside.vms.deliver()
    gate.wait()
    stops = [Background(lambda: world.stop(container)) for _ in range(2)]
    assert world.container(container).claims == (CLAIM,)
    gate.open()
    for stop in stops:
        stop.done()
        assert is_free(world)
    assert world.outside.drivers.resets == [ADDRESS], "all of them share one"


@pytest.mark.parametrize("pod", ["web", "next"])
def test_a_pod_that_is_granted_the_device_meanwhile_gets_it_after_the_reset(world: World, pod: str) -> None:
    container = with_device(world)
    sandbox = sandbox_of(world, container) if pod == "web" else world.run(pod)
    gate = world.journal.hold("drivers.reset")
    off(world, container)
    world.outside.vms.deliver()
    gate.wait()
    created = Background(lambda: world.create(sandbox, attempt=1, config=WITH_DEVICE))
    gate.open()
    created.done()
    calls = world.journal.calls
    last_made = len(calls) - 1 - calls[::-1].index("records.containers.add")
    assert calls.index("drivers.reset") < last_made


def test_a_create_whose_deadline_is_too_short_for_the_reset_fails_with_the_reason(world: World) -> None:
    container = with_device(world)
    sandbox = world.run("next")
    gate = world.journal.hold("drivers.reset")
    off(world, container)
    world.outside.vms.deliver()
    gate.wait()
    with pytest.raises(WrongState, match=f"{CLAIM} is held by container vm .* It is being reset"):
        world.do.create_container.create(sandbox, ContainerName("vm", 0), WITH_DEVICE, world.deadline(0.01))
    assert world.container(container).claims == (CLAIM,)
    gate.open()


def test_a_pods_network_waits_for_its_devices(world: World) -> None:
    container = with_device(world)
    sandbox = sandbox_of(world, container)
    gate = world.journal.hold("drivers.reset")
    stop = Background(lambda: world.stop_sandbox(sandbox))
    gate.wait()
    wait_until(lambda: not world.sandbox(sandbox).is_ready, WAIT_LIMIT, "the pod is told to be stopped")
    assert sandbox in world.outside.networks.networks
    gate.open()
    stop.done()
    assert world.sandbox(sandbox).network_released
    assert is_free(world)


@pytest.mark.parametrize("what", ["container", "pod"])
def test_a_removal_waits_for_its_devices_after_the_containers_end_is_reported(world: World, what: str) -> None:
    container = with_device(world)
    sandbox = sandbox_of(world, container)
    changes = world.app.services.events.subscribe()
    gate = world.journal.hold("drivers.reset")
    remove = partial(world.remove, container) if what == "container" else partial(world.remove_sandbox, sandbox)
    removal = Background(remove)
    gate.wait()
    assert Background(lambda: stopped(changes, 1)).done() <= {container.value, sandbox.value}
    assert world.container(container).claims == (CLAIM,)
    gate.open()
    removal.done()
    assert world.records.containers.get(container) is None


def test_an_unfinished_release_is_completed_after_the_next_start(world: World) -> None:
    container = with_device(world)
    gate = world.journal.hold("drivers.reset")
    off(world, container)
    world.outside.vms.deliver()
    gate.wait()
    world.journal.crash(1)
    gate.open()
    with pytest.raises(Crash):
        world.app.devices.releases.finish(container)
    again = world.recovered()
    assert again.container(container).exit is not None
    wait_until(lambda: is_free(again), WAIT_LIMIT, "nobody asks, and the device is free")
    assert again.outside.drivers.resets == [ADDRESS, ADDRESS]
    again.close()


def test_a_device_is_kept_until_its_fault_can_be_recorded(world: World) -> None:
    container = with_device(world)
    world.journal.fail("drivers.reset", InternalError("it did not come out of it"))
    world.journal.fail("records.device_conditions.put", ResourceExhausted("disk full"))
    world.stop(container)
    assert world.container(container).phase is ContainerPhase.EXITED
    assert world.container(container).claims == (CLAIM,)
    world.app.watch.look()
    wait_until(lambda: is_free(world), WAIT_LIMIT, "the device is free after the next look")
    assert world.outside.drivers.resets == [ADDRESS]


def test_a_removal_that_cannot_release_the_device_keeps_the_record(world: World) -> None:
    container = with_device(world)
    world.journal.fail("drivers.reset", InternalError("it did not come out of it"))
    world.journal.fail("records.device_conditions.put", ResourceExhausted("disk full"))
    with pytest.raises(ResourceExhausted):
        world.remove(container)
    assert world.container(container).claims == (CLAIM,)
    world.remove(container)
    assert world.records.containers.all() == []


def test_the_reconciler_does_not_lock_the_pod_while_it_finishes_a_removal(world: World) -> None:
    container = with_device(world)
    sandbox = sandbox_of(world, container)
    world.journal.fail("disks.delete", Unavailable("busy"))
    with pytest.raises(Unavailable):
        world.remove(container)
    reconcile = world.app.recovery.reconcile
    reconcile.look()
    world.outside.clock.advance(60)
    gate = world.journal.hold("drivers.reset")
    look = Background(reconcile.look)
    gate.wait()
    assert Background(lambda: world.create(sandbox, attempt=1)).done()
    gate.open()
    look.done()
    assert world.records.containers.get(container) is None
    assert is_free(world)


def test_a_stopping_daemon_begins_no_release(world: World) -> None:
    container = with_device(world)
    world.app.devices.releases.close()
    off(world, container)
    world.outside.vms.deliver()
    assert world.container(container).claims == (CLAIM,)
    again = world.recovered()
    wait_until(lambda: is_free(again), WAIT_LIMIT, "the next daemon makes it")
    again.close()


def test_many_releases_at_once_all_complete(world: World) -> None:
    containers = []
    for n in range(12):
        node = f"/dev/vfio/{100 + n}"
        world.outside.devices.add_function(node, f"0000:4b:{n:02x}.0")
        container = world.create(world.run(f"pod-{n}"), config=container_config(devices=(CriDevice(node, node),)))
        world.start(container)
        containers.append(container)
    for container in containers:
        off(world, container)
    world.outside.vms.deliver()
    wait_until(
        lambda: not any(world.container(container).claims for container in containers), WAIT_LIMIT, "all are released"
    )
    assert len(world.outside.drivers.resets) == 12
