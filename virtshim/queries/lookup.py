"""From what a caller typed to a record: full ids and unique prefixes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from virtshim.domain.container import Container
from virtshim.domain.errors import InvalidRequest, WrongState
from virtshim.domain.ids import ContainerId, SandboxId
from virtshim.domain.sandbox import Sandbox
from virtshim.ports.records import Records
from virtshim.primitives.existing import no_such_container, no_such_sandbox


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
