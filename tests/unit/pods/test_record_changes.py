"""Each change in a pod's life is one event, with the pod as it was at that time."""

from typing import Any

import pytest
from fakes.world import World, pod_key, sandbox_config

from virtshim.model.container import ContainerPhase, ExitReason
from virtshim.model.errors import InternalError, Unavailable
from virtshim.model.ids import SandboxId
from virtshim.model.sandbox import Sandbox, SandboxPhase
from virtshim.model.vm import OffReason
from virtshim.pods.events import ContainerEvent, EventBroadcaster, EventType, Subscription

NOBODY = Sandbox(SandboxId("0" * 64), pod_key("nobody"), sandbox_config(), created_at=1)


@pytest.fixture
def broadcaster(world: World) -> EventBroadcaster:
    return world.app.services.events


@pytest.fixture
def listener(broadcaster: EventBroadcaster) -> Subscription:
    return broadcaster.subscribe()


def heard(world: World, listener: Subscription) -> list[ContainerEvent]:
    """All so far."""
    world.app.services.events.publish([EventType.CREATED], "the end", NOBODY, [])
    changes: list[ContainerEvent] = []
    while (change := listener.next()) is not None and change.id != "the end":
        changes.append(change)
    return changes


def told(changes: list[ContainerEvent], *ids: Any) -> list[str]:
    """`a created`: the first of `ids` was created; then b, c ..."""
    name = {str(one): letter for one, letter in zip(ids, "abcdef", strict=False)}
    return [f"{name[change.id]} {change.kind.value}" for change in changes]


def test_a_pods_life_in_order(world: World, listener: Subscription) -> None:
    sandbox, container = world.running()
    world.stop(container)
    world.remove(container)
    world.stop_sandbox(sandbox)
    world.remove_sandbox(sandbox)
    assert told(heard(world, listener), sandbox, container) == [
        *("a created", "a started"),
        *("b created", "b started", "b stopped", "b deleted"),
        *("a stopped", "a deleted"),
    ]


def test_each_event_has_the_pod_as_it_was(world: World, listener: Subscription) -> None:
    sandbox, container = world.running()
    world.stop(container)
    world.remove(container)
    world.remove_sandbox(sandbox)
    seen = [(c.sandbox.phase, [one.phase for one in c.containers]) for c in heard(world, listener)]
    ready, not_ready = SandboxPhase.READY, SandboxPhase.NOT_READY
    assert seen == [
        *((ready, []), (ready, [])),
        (ready, [ContainerPhase.CREATED]),
        (ready, [ContainerPhase.RUNNING]),
        (ready, [ContainerPhase.EXITED]),
        (ready, [ContainerPhase.REMOVING]),  # as it was last: with its exit
        *((not_ready, []), (not_ready, [])),
    ]


def test_removing_a_running_pod_at_once_gives_the_same_stop_events(world: World, listener: Subscription) -> None:
    sandbox, container = world.running()
    world.remove_sandbox(sandbox)
    changes = heard(world, listener)[4:]
    assert told(changes, sandbox, container) == ["b stopped", "a stopped", "b deleted", "a deleted"]


def test_removing_a_running_container_first_gives_a_stop_event_with_its_exit(
    world: World, listener: Subscription
) -> None:
    _, container = world.running()
    world.remove(container)
    stopped, deleted = heard(world, listener)[4:]
    assert told([stopped, deleted], container) == ["a stopped", "a deleted"]
    for change in (stopped, deleted):
        (last,) = change.containers
        assert last.exit is not None
        assert (last.exit.code, last.exit.message) == (137, "killed: it was removed while running")


def test_a_guest_that_ends_by_itself_gives_an_event(world: World, listener: Subscription) -> None:
    sandbox, container = world.running()
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.outside.vms.deliver()
    world.outside.vms.deliver()
    (stopped,) = heard(world, listener)[4:]
    assert told([stopped], container) == ["a stopped"]
    assert stopped.sandbox.id == sandbox
    assert stopped.containers[0].exit is not None
    assert stopped.containers[0].exit.reason is ExitReason.COMPLETED


def test_a_failed_start_is_a_stop_event(world: World, listener: Subscription) -> None:
    world.pull()
    container = world.create(world.run())
    world.journal.fail("vms.start", InternalError("no"))
    with pytest.raises(InternalError):
        world.start(container)
    assert told(heard(world, listener)[2:], container) == ["a created", "a stopped"]


def test_a_failed_create_that_was_undone_gives_no_event(world: World, listener: Subscription) -> None:
    world.pull()
    world.journal.fail("networks.attach", Unavailable("no"))
    with pytest.raises(Unavailable):
        world.run("web")
    sandbox = world.run("db")
    world.journal.fail("disks.create", InternalError("no"))
    with pytest.raises(InternalError):
        world.create(sandbox)
    assert told(heard(world, listener), sandbox) == ["a created", "a started"]


def test_a_sandbox_whose_undo_failed_gives_created_and_deleted_events_only(
    world: World, listener: Subscription
) -> None:
    world.journal.fail("networks.attach", Unavailable("no"), after=True)
    world.journal.fail("networks.release", Unavailable("no"))
    with pytest.raises(Unavailable):
        world.run()
    (left,) = world.records.sandboxes.all()
    world.remove_sandbox(left.id)
    assert told(heard(world, listener), left.id) == ["a created", "a deleted"]


def test_repeated_calls_give_no_new_events(world: World, listener: Subscription) -> None:
    sandbox = world.run()
    container, _ = world.create(sandbox), world.create(sandbox, name="other")
    world.start(container)
    world.run()
    count = len(heard(world, listener))
    world.stop(container)
    world.create(sandbox, name="other")
    world.stop(container)
    world.stop_sandbox(sandbox)
    world.stop_sandbox(sandbox)
    assert (count, told(heard(world, listener), sandbox, container)) == (5, ["b stopped", "a stopped"])


def test_events_of_pods_do_not_mix(world: World, listener: Subscription) -> None:
    one, vm_one = world.running("one")
    two, vm_two = world.running("two")
    for change in heard(world, listener):
        mine = {str(one): vm_one, str(two): vm_two}[str(change.sandbox.id)]
        assert change.id in (str(change.sandbox.id), str(mine))
        assert {container.id for container in change.containers} <= {mine}


def test_the_record_is_on_disk_before_its_event_is_sent(world: World, listener: Subscription) -> None:
    world.journal.fail("records.sandboxes.replace", InternalError("the disk is full"), times=9)
    with pytest.raises(InternalError):
        world.run()
    assert heard(world, listener) == []
