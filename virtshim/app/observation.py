"""Composition of what is counted and told of pods: usage, places for commands, events."""

from __future__ import annotations

from collections.abc import Mapping

from virtshim.app.adapters import Adapters
from virtshim.config import Settings
from virtshim.metrics.usage import Usage
from virtshim.passthrough.assembly import DeviceServices
from virtshim.primitives.clock import Stamps
from virtshim.primitives.pod_places import PodPlaces
from virtshim.queries.container_events import EventBroadcaster
from virtshim.queries.record_changes import RecordChanges

# GetContainerEvents streams at once: each holds a thread of the calls' pool, of which they may have a quarter at most.
_MAX_LISTENERS = 16


def usage(a: Adapters, devices: DeviceServices, commands: PodPlaces) -> Usage:
    def refused(pod: str) -> Mapping[str, int]:
        return {"commands": commands.refusals(pod), **a.streaming.refused(pod)}

    return Usage(a.records, a.readings, a.networks, a.disks, devices.health, a.clock, refused)


def broadcaster(settings: Settings, a: Adapters) -> EventBroadcaster:
    most = min(_MAX_LISTENERS, settings.cri.max_calls // 4)
    made = EventBroadcaster(Stamps(a.clock, a.records.newest_stamp()), most)
    changes = RecordChanges(a.records, made)
    a.records.sandboxes.on_change(changes.sandbox_changed)
    a.records.containers.on_change(changes.container_changed)
    return made
