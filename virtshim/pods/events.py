"""Turns changes of records into pod events, and publishes them to subscribers."""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from virtshim.model.container import Container
from virtshim.model.errors import ResourceExhausted, ShimError, Unavailable
from virtshim.model.ids import SandboxId
from virtshim.model.sandbox import Sandbox
from virtshim.store.ports import Records
from virtshim.system.clock import Stamps

# Publishing: subscribers get changes in order, after they are on disk, and the publisher never waits for a subscriber.

log = structlog.get_logger(__name__)


class EventType(enum.Enum):
    CREATED = "created"
    STARTED = "started"
    STOPPED = "stopped"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class ContainerEvent:
    """`id`: of the sandbox or the container that changed. `at`: nanoseconds since the epoch, strictly increasing.
    `sandbox` and `containers`: the pod after the change, or as it was last if it was deleted."""

    kind: EventType
    id: str
    at: int
    sandbox: Sandbox
    containers: tuple[Container, ...]


class Subscription:
    """One subscriber's bounded queue, made by `EventBroadcaster.subscribe`. One thread reads it, any thread may close
    it."""

    def __init__(self, forget: Callable[[Subscription], None], on_drop: Callable[[], object], room: int) -> None:
        self._room = room
        self._forget = forget
        self._on_drop = on_drop
        self._changed = threading.Condition()
        self._waiting: deque[ContainerEvent] = deque()
        self._closed = False
        self._error: ShimError | None = None

    def next(self) -> ContainerEvent | None:
        """Waits for the next change; None after `close`. Raises ResourceExhausted if this subscriber was too slow (its
        waiting changes are lost), Unavailable when the daemon stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed or self._error)
            if self._error is not None:
                raise self._error
            return None if self._closed else self._waiting.popleft()

    def close(self) -> None:
        """Ends the subscription and frees its queue. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._forget(self)

    def offer(self, change: ContainerEvent) -> bool:
        """Adds a change. False if the queue is full: the subscription has then ended."""
        with self._changed:
            if len(self._waiting) < self._room:
                self._waiting.append(change)
                self._changed.notify_all()
                return True
        self.end(
            ResourceExhausted(f"this client fell {self._room} events behind and was dropped; list, then follow again")
        )
        self._on_drop()
        return False

    def end(self, error: ShimError) -> None:
        """Makes `next` raise this error from now on."""
        with self._changed:
            self._error = error
            self._waiting.clear()
            self._changed.notify_all()


class EventBroadcaster:
    """`most`: how many may subscribe at once, because each may hold a thread of the caller."""

    def __init__(self, stamps: Stamps, most: int, room: int = 1024) -> None:
        """`room`: how many changes may wait for one subscriber. The default is a minute on a busy node; changes are
        small, because they only refer to records."""
        self.room = room
        # Seconds for a subscriber that fell behind to read what is waiting for it, and then why it was dropped.
        self.grace = 10.0
        self._stamps = stamps
        self._most = most
        self._lock = threading.Lock()
        self._listeners: list[Subscription] = []
        self._closed = False

    @property
    def has_listeners(self) -> bool:
        """Whether anybody has subscribed."""
        return bool(self._listeners)

    def subscribe(self, on_drop: Callable[[], object] = lambda: None) -> Subscription:
        """Subscribes to all changes from now on. `on_drop` is called once, on the publisher's thread, if the subscriber
        falls behind; it must not wait or raise. Raises ResourceExhausted if `most` have subscribed, Unavailable after
        `close`."""
        with self._lock:
            if self._closed:
                raise _stopping()
            if len(self._listeners) >= self._most:
                raise ResourceExhausted(
                    f"{self._most} clients already follow events; end one of them, or raise cri.max_calls"
                )
            made = Subscription(self._forget, on_drop, self.room)
            self._listeners.append(made)
            return made

    def publish(
        self, kinds: Sequence[EventType], changed: str, sandbox: Sandbox, containers: Sequence[Container]
    ) -> None:
        """Must be called after the record is written, for one change after another, so that `at` gives their order."""
        with self._lock:
            for kind in kinds:
                change = ContainerEvent(kind, changed, self._stamps.next(), sandbox, tuple(containers))
                slow = [listener for listener in self._listeners if not listener.offer(change)]
                for listener in slow:
                    self._listeners.remove(listener)
                    log.warning("events.listener.dropped", behind=self.room, left=len(self._listeners))

    def close(self) -> None:
        """Ends all subscriptions, because the daemon stops. New ones are refused."""
        with self._lock:
            self._closed = True
            for listener in self._listeners:
                listener.end(_stopping())
            self._listeners.clear()

    def _forget(self, listener: Subscription) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)


def _stopping() -> Unavailable:
    return Unavailable("virtshim is stopping; list, then follow again")


@dataclass(frozen=True, slots=True)
class RecordChanges:
    """Gets each written record and publishes what the change means for the pod."""

    records: Records
    broadcaster: EventBroadcaster

    def sandbox_changed(self, before: Sandbox | None, after: Sandbox | None) -> None:
        now = after or before
        if now is not None and self.broadcaster.has_listeners:
            containers = self._containers_of(now.id)
            self.broadcaster.publish(sandbox_changes(before, after), now.id.value, now, containers)

    def container_changed(self, before: Container | None, after: Container | None) -> None:
        now = after or before
        if now is None or not self.broadcaster.has_listeners:
            return
        sandbox = self.records.sandboxes.get(now.sandbox_id)
        if sandbox is None:  # without its pod the container has no name for subscribers
            return
        containers = self._containers_of(now.sandbox_id)
        if after is None:
            containers = sorted([*containers, now], key=lambda container: container.created_at)
        self.broadcaster.publish(container_changes(before, after), now.id.value, sandbox, containers)

    def _containers_of(self, sandbox: SandboxId) -> list[Container]:
        return [c for c in self.records.containers.all() if c.sandbox_id == sandbox and c.is_visible]


def sandbox_changes(before: Sandbox | None, after: Sandbox | None) -> Sequence[EventType]:
    """The events for a change of a sandbox's record. For callers a half-made sandbox, or an adopted one, does not exist. Pure."""
    was_shown, is_shown = before is not None and before.is_visible, after is not None and after.is_visible
    was_ready = was_shown and before is not None and before.is_ready
    is_ready = is_shown and after is not None and after.is_ready
    happened = (
        (is_shown and not was_shown, EventType.CREATED),
        (is_ready and not was_ready, EventType.STARTED),
        (was_ready and not is_ready, EventType.STOPPED),
        (was_shown and not is_shown, EventType.DELETED),
    )
    return [change for did, change in happened if did]


def container_changes(before: Container | None, after: Container | None) -> Sequence[EventType]:
    """Like `sandbox_changes`, for a container. A failed start counts as a stop, because the container then has an exit.
    Pure."""
    was_shown, is_shown = before is not None and before.is_visible, after is not None and after.is_visible
    happened = (
        (is_shown and not was_shown, EventType.CREATED),
        (_runs(after) and not _runs(before), EventType.STARTED),
        (_ended(before, after), EventType.STOPPED),
        (was_shown and not is_shown, EventType.DELETED),
    )
    return [change for did, change in happened if did]


def _runs(container: Container | None) -> bool:
    return container is not None and container.is_running


def _ended(before: Container | None, after: Container | None) -> bool:
    if before is None or before.exit is not None:
        return False
    return before.status.started_at > 0 if after is None else after.exit is not None
