"""The record that a call is about, or NotFound."""

from __future__ import annotations

from virtshim.domain.container import Container
from virtshim.domain.errors import NotFound
from virtshim.domain.ids import ContainerId, SandboxId
from virtshim.domain.sandbox import Sandbox
from virtshim.ports.records import Records


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
