"""Finds records: by full id or unique prefix, as callers type them, and by filters for lists. Never writes, never
waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from virtshim.model.container import Container
from virtshim.model.errors import InvalidRequest, NotFound, WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.sandbox import Sandbox
from virtshim.store.ports import Records

# The record with a full id; raises NotFound.


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
    """The pod as `namespace/name`, or its sandbox's id if the sandbox has no record any more."""
    sandbox = records.sandboxes.get(container.sandbox_id)
    return sandbox.key.readable if sandbox is not None else container.sandbox_id.short


# Lists.


@dataclass(frozen=True, slots=True)
class Filter:
    """All fields that are set must match: `id` and `sandbox_id` by prefix, labels exactly. `adopted`: adopted sandboxes, too."""

    id: str = ""
    sandbox_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    adopted: bool = False


def list_sandboxes(records: Records, wanted: Filter) -> Sequence[Sandbox]:
    return [
        s
        for s in records.sandboxes.all()
        if _is_shown(s, adopted=wanted.adopted)
        and s.id.value.startswith(wanted.id)
        and _has(s.config.labels, wanted.labels)
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


def _is_shown(sandbox: Sandbox, *, adopted: bool) -> bool:
    return sandbox.is_made if adopted else sandbox.is_visible


T = TypeVar("T", Sandbox, Container)


def find_sandbox(records: Records, text: str, *, adopted: bool = False) -> Sandbox | None:
    """None if no record matches. Raises InvalidRequest if several match, or if `text` is empty. `adopted`: adopted sandboxes
    match, too."""
    shown = (one for one in records.sandboxes.all() if _is_shown(one, adopted=adopted))
    return _by_prefix(shown, text, "pod sandbox")


def find_container(records: Records, text: str) -> Container | None:
    """Like `find_sandbox`."""
    return _by_prefix((one for one in records.containers.all() if one.is_visible), text, "container")


def get_sandbox(records: Records, text: str, *, adopted: bool = False) -> Sandbox:
    """Raises NotFound."""
    found = find_sandbox(records, text, adopted=adopted)
    if found is None:
        raise no_such_sandbox(repr(text[:80]))
    return found


def find_any_sandbox(records: Records, text: str) -> Sandbox | None:
    """Like `find_sandbox`. An adopted sandbox is found by its full id alone: its callers know it from the runtime that made
    it."""
    hidden = (one for one in records.sandboxes.all() if one.adopted is not None and one.id.value == text)
    return next(hidden, None) or find_sandbox(records, text)


def get_any_sandbox(records: Records, text: str) -> Sandbox:
    """Like `find_any_sandbox`. Raises NotFound."""
    found = find_any_sandbox(records, text)
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


def running(records: Records, container: ContainerId) -> Container | None:
    """The container's record; None if it does not run."""
    found = records.containers.get(container)
    return found if found is not None and found.is_running else None


def require_running(container: Container) -> None:
    """Raises WrongState if the container does not run."""
    if not container.is_running:
        raise WrongState(f"container {container.id.short} is {container.phase.value}, not running")


def _by_prefix(records: Iterable[T], text: str, what: str) -> T | None:
    if not text:
        raise InvalidRequest(f"the {what} id is empty")
    matches = [record for record in records if record.id.value.startswith(text)]
    if len(matches) > 1:
        raise InvalidRequest(f"{what} id {text!r} is ambiguous: {len(matches)} match; give more digits")
    return matches[0] if matches else None
