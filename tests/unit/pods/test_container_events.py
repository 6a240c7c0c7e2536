"""Every listener gets all events in order, and a slow listener delays no other."""

import threading

import pytest
from fakes.background import Background
from fakes.clock import FakeClock
from structlog.testing import capture_logs

from virtshim.model.errors import ResourceExhausted, Unavailable
from virtshim.model.ids import SandboxId
from virtshim.model.sandbox import PodKey, Sandbox, SandboxConfig
from virtshim.pods.events import ContainerEvent, EventBroadcaster, EventType, Subscription
from virtshim.system.clock import Stamps

POD = Sandbox(SandboxId("a" * 64), PodKey("default", "web", "u", 0), SandboxConfig(), created_at=1)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def broadcaster(clock: FakeClock) -> EventBroadcaster:
    return EventBroadcaster(Stamps(clock, 0), most=3)


def say(broadcaster: EventBroadcaster, *names: str) -> None:
    for name in names:
        broadcaster.publish([EventType.CREATED], name, POD, [])


def heard(listener: Subscription, count: int) -> list[ContainerEvent]:
    changes = [listener.next() for _ in range(count)]
    return [change for change in changes if change is not None]


def test_every_listener_gets_all_events_in_the_same_order(broadcaster: EventBroadcaster) -> None:
    listeners = [broadcaster.subscribe() for _ in range(3)]
    say(broadcaster, "one", "two", "three")
    for listener in listeners:
        assert [change.id for change in heard(listener, 3)] == ["one", "two", "three"]


def test_several_changes_at_once_keep_their_order_and_have_the_same_pod_state(broadcaster: EventBroadcaster) -> None:
    listener = broadcaster.subscribe()
    broadcaster.publish([EventType.CREATED, EventType.STARTED], "pod", POD, [])
    assert [(c.kind, c.id, c.sandbox, c.containers) for c in heard(listener, 2)] == [
        (EventType.CREATED, "pod", POD, ()),
        (EventType.STARTED, "pod", POD, ()),
    ]


def test_stamps_increase_strictly_even_when_the_clock_stops_or_is_set_back(
    broadcaster: EventBroadcaster, clock: FakeClock
) -> None:
    listener = broadcaster.subscribe()
    say(broadcaster, "one", "two")
    clock.set_back(3600)
    say(broadcaster, "three")
    stamps = [change.at for change in heard(listener, 3)]
    assert stamps == sorted(set(stamps))


def test_a_later_listener_gets_only_later_events(broadcaster: EventBroadcaster) -> None:
    say(broadcaster, "before")
    listener = broadcaster.subscribe()
    say(broadcaster, "after")
    assert [change.id for change in heard(listener, 1)] == ["after"]


def test_a_listener_that_waits_is_woken(broadcaster: EventBroadcaster) -> None:
    listener = broadcaster.subscribe()
    waiting = Background(listener.next)
    say(broadcaster, "news")
    change = waiting.done()
    assert isinstance(change, ContainerEvent)
    assert change.id == "news"


def test_a_listener_that_falls_behind_is_dropped_with_a_reason_and_others_are_unaffected(
    clock: FakeClock,
) -> None:
    broadcaster = EventBroadcaster(Stamps(clock, 0), most=3, room=3)
    dropped = threading.Event()
    slow, quick = broadcaster.subscribe(on_drop=dropped.set), broadcaster.subscribe()
    read = []
    with capture_logs() as logs:
        for name in ("1", "2", "3", "4", "5"):
            assert not dropped.is_set() or name == "5"
            say(broadcaster, name)
            read += heard(quick, 1)
    assert [change.id for change in read] == ["1", "2", "3", "4", "5"]
    assert dropped.is_set()
    assert [line["event"] for line in logs] == ["events.listener.dropped"]
    for _ in range(2):
        with pytest.raises(ResourceExhausted, match="fell 3 events behind"):
            slow.next()


def test_a_dropped_listener_makes_room_for_another(clock: FakeClock) -> None:
    broadcaster = EventBroadcaster(Stamps(clock, 0), most=3, room=1)
    for _ in range(3):
        broadcaster.subscribe()
    say(broadcaster, "1", "2")
    assert not broadcaster.has_listeners
    assert broadcaster.subscribe()


def test_one_listener_too_many_is_refused_until_another_closes(broadcaster: EventBroadcaster) -> None:
    first, _, _ = (broadcaster.subscribe() for _ in range(3))
    with pytest.raises(ResourceExhausted, match="3 clients already follow events"):
        broadcaster.subscribe()
    first.close()
    assert broadcaster.subscribe()


def test_a_closed_subscription_ends_its_wait_and_keeps_no_events(broadcaster: EventBroadcaster) -> None:
    listener = broadcaster.subscribe()
    waiting = Background(listener.next)
    listener.close()
    assert waiting.done() is None
    assert not broadcaster.has_listeners
    say(broadcaster, "news")
    assert listener.next() is None
    listener.close()


def test_when_the_daemon_stops_listeners_are_told_and_new_ones_refused(broadcaster: EventBroadcaster) -> None:
    listener = broadcaster.subscribe()
    waiting = Background(listener.next)
    broadcaster.close()
    with pytest.raises(Unavailable, match="stopping"):
        waiting.done()
    with pytest.raises(Unavailable, match="stopping"):
        broadcaster.subscribe()
