"""Lists: filters over what is in memory. Never writes, never waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from virtshim.domain.container import Container
from virtshim.domain.sandbox import Sandbox
from virtshim.ports.records import Records


@dataclass(frozen=True, slots=True)
class Filter:
    """All that is set must match. `id` and `sandbox_id` match by prefix; labels exactly, all of them."""

    id: str = ""
    sandbox_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


def list_sandboxes(records: Records, wanted: Filter) -> Sequence[Sandbox]:
    return [
        s
        for s in records.sandboxes.all()
        if s.is_visible and s.id.value.startswith(wanted.id) and _has(s.config.labels, wanted.labels)
    ]


def list_containers(records: Records, wanted: Filter) -> Sequence[Container]:
    return [
        c
        for c in records.containers.all()
        if c.is_visible
        and c.id.value.startswith(wanted.id)
        and c.sandbox_id.value.startswith(wanted.sandbox_id)
        and _has(c.config.labels, wanted.labels)
    ]


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())
