"""From what a caller typed to a record: full ids and unique prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from virtshim.model.container import Container
from virtshim.model.errors import InvalidRequest, NotFound, WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.sandbox import Sandbox
from virtshim.store.ports import Records

# The record that a call is about, or NotFound.


def existing_container(records: Records, container: ContainerId) -> Container:
    found = records.containers.get(container)
    if found is None:
        raise no_such_container(container)
    return found


def existing_sandbox(records: Records, sandbox: SandboxId) -> Sandbox:
    found = records.sandboxes.get(sandbox)
    if found is None:
        raise no_such_sandbox(sandbox)
    return found


def no_such_container(named: object) -> NotFound:
    return NotFound(f"no such container: {named}")


def no_such_sandbox(named: object) -> NotFound:
    return NotFound(f"no such pod sandbox: {named}")


def pod_of(records: Records, container: Container) -> str:
    """As `namespace/name`; its sandbox's id if that has no record any more."""
    sandbox = records.sandboxes.get(container.sandbox_id)
    return sandbox.key.readable if sandbox is not None else container.sandbox_id.short


# Lists: filters over what is in memory. Never writes, never waits.


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


class _Record(Protocol):
    @property
    def id(self) -> SandboxId | ContainerId: ...

    @property
    def is_visible(self) -> bool: ...


T = TypeVar("T", bound=_Record)


def find_sandbox(records: Records, text: str) -> Sandbox | None:
    """None if nothing matches; InvalidRequest if several do, or if `text` is empty."""
    return _by_prefix(records.sandboxes.all(), text, "pod sandbox")


def find_container(records: Records, text: str) -> Container | None:
    """As `find_sandbox`."""
    return _by_prefix(records.containers.all(), text, "container")


def get_sandbox(records: Records, text: str) -> Sandbox:
    """Raises NotFound."""
    found = find_sandbox(records, text)
    if found is None:
        raise no_such_sandbox(repr(text[:80]))
    return found


def get_container(records: Records, text: str) -> Container:
    """Raises NotFound."""
    found = find_container(records, text)
    if found is None:
        raise no_such_container(repr(text[:80]))
    return found


def get_running_container(records: Records, text: str) -> Container:
    """Raises NotFound, WrongState."""
    container = get_container(records, text)
    require_running(container)
    return container


def require_running(container: Container) -> None:
    """WrongState if it does not run."""
    if not container.is_running:
        raise WrongState(f"container {container.id.short} is {container.phase.value}, not running")


def _by_prefix(records: Iterable[T], text: str, what: str) -> T | None:
    if not text:
        raise InvalidRequest(f"the {what} id is empty")
    matches = [record for record in records if record.is_visible and record.id.value.startswith(text)]
    if len(matches) > 1:
        raise InvalidRequest(f"{what} id {text!r} is ambiguous: {len(matches)} match; give more digits")
    return matches[0] if matches else None
