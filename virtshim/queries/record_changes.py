"""From records to events: the one place that knows which change of a record is which event of a pod."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from virtshim.domain.container import Container
from virtshim.domain.ids import SandboxId
from virtshim.domain.sandbox import Sandbox
from virtshim.ports.records import Records
from virtshim.queries.container_events import EventBroadcaster, EventType


@dataclass(frozen=True, slots=True)
class RecordChanges:
    """Hears of each written record and announces what that means for the pod."""

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
        if sandbox is None:  # nobody can place a container without its pod
            return
        containers = self._containers_of(now.sandbox_id)
        if after is None:
            containers = sorted([*containers, now], key=lambda container: container.created_at)
        self.broadcaster.publish(container_changes(before, after), now.id.value, sandbox, containers)

    def _containers_of(self, sandbox: SandboxId) -> list[Container]:
        return [c for c in self.records.containers.all() if c.sandbox_id == sandbox and c.is_visible]


def sandbox_changes(before: Sandbox | None, after: Sandbox | None) -> Sequence[EventType]:
    """What callers are told of a change of the record; a half-made sandbox does not exist for them. Pure."""
    was_shown, is_shown = before is not None and before.is_visible, after is not None and after.is_visible
    was_ready, is_ready = before is not None and before.is_ready, after is not None and after.is_ready
    happened = (
        (is_shown and not was_shown, EventType.CREATED),
        (is_ready and not was_ready, EventType.STARTED),
        (was_ready and not is_ready, EventType.STOPPED),
        (was_shown and not is_shown, EventType.DELETED),
    )
    return [change for did, change in happened if did]


def container_changes(before: Container | None, after: Container | None) -> Sequence[EventType]:
    """As `sandbox_changes`. A failed start is a stop too: the container has an exit then. Pure."""
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
