"""Plans the repairs at start-up from the records and from what exists. Pure. It deletes only on positive evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from virtshim.model.container import Container, ContainerPhase
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.sandbox import Sandbox, SandboxPhase, pod_hash
from virtshim.model.vm import OwnedDomain


@dataclass(frozen=True, slots=True)
class NodeState:
    """What was read. Each part was read without error; otherwise there is no plan. `in_doubt`: single records or
    domains could not be read, so what seems to have no record may have one. `shares`: short ids of containers whose
    volumes are served."""

    sandboxes: Sequence[Sandbox]
    containers: Sequence[Container]
    domains: Sequence[OwnedDomain]
    networks: frozenset[SandboxId]
    directories: frozenset[ContainerId]
    pods_with_disks: frozenset[str]
    rebooted: bool
    shares: frozenset[str] = frozenset()
    in_doubt: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """`undo_*`: half-made or half-removed, to be removed. `follow`: VMs that keep running. `adopt`: CREATED in the
    record, but the VM runs. `settle`: RUNNING in the record, but the VM has ended. `stray_*`: with this node's mark,
    without a record. `unwanted_domains`: EXITED in the record, but the VM runs. `checkpoints`, `resizes`, `states` (saved or
    restored): begun and not finished. A container that gets a new QEMU is in `follow` even if its VM is
    off. No container is in two of the other lists, and UNKNOWN containers are in none."""

    undo_sandboxes: tuple[Sandbox, ...]
    undo_containers: tuple[Container, ...]
    lost_networks: tuple[Sandbox, ...]
    adopt: tuple[Container, ...]
    follow: tuple[Container, ...]
    settle: tuple[Container, ...]
    stray_domains: tuple[OwnedDomain, ...]
    unwanted_domains: tuple[OwnedDomain, ...]
    stray_networks: tuple[SandboxId, ...]
    stray_directories: tuple[ContainerId, ...]
    stray_pod_disks: tuple[str, ...]
    checkpoints: tuple[Container, ...]
    resizes: tuple[Container, ...] = ()
    states: tuple[Container, ...] = ()
    stray_shares: tuple[str, ...] = ()

    def without_deletions(self) -> Plan:
        """The plan without removals of things that have no record, and without ending VMs."""
        return dataclasses.replace(
            self, stray_domains=(), stray_networks=(), stray_directories=(), stray_pod_disks=(), stray_shares=()
        )


def plan(found: NodeState) -> Plan:
    known = {container.id for container in found.containers}
    sandboxes = {sandbox.id for sandbox in found.sandboxes}
    on = {domain.container_id for domain in found.domains if not domain.state.has_ended}
    defined = {domain.container_id for domain in found.domains}
    half = (ContainerPhase.CREATING, ContainerPhase.REMOVING)
    undo = tuple(c for c in found.containers if c.phase in half or _is_orphan(c, sandboxes, found))
    undone = {c.id for c in undo}
    whole = [c for c in found.containers if c.id not in undone]
    running = [c for c in whole if c.is_running]
    exited = {c.id for c in whole if c.phase is ContainerPhase.EXITED}
    todo = Plan(
        undo_sandboxes=tuple(s for s in found.sandboxes if s.phase in (SandboxPhase.CREATING, SandboxPhase.REMOVING)),
        undo_containers=undo,
        lost_networks=tuple(
            s for s in found.sandboxes if s.is_ready and (found.rebooted or s.id not in found.networks)
        ),
        adopt=tuple(c for c in whole if c.phase is ContainerPhase.CREATED and c.id in on),
        follow=tuple(c for c in running if c.id in on or c.status.renewing),
        settle=tuple(c for c in running if c.id not in on and not c.status.renewing),
        stray_domains=tuple(d for d in found.domains if d.container_id not in known),
        unwanted_domains=tuple(d for d in found.domains if d.container_id in exited and d.state.is_on),
        stray_networks=tuple(sorted(n for n in found.networks if n not in sandboxes)),
        stray_directories=tuple(sorted(d for d in found.directories if d not in known)),
        stray_pod_disks=tuple(sorted(found.pods_with_disks - {pod_hash(s.key) for s in found.sandboxes})),
        states=tuple(c for c in running if _is_saved_or_restored(c, on)),
        checkpoints=tuple(c for c in found.containers if c.status.checkpointing or c.status.frozen),
        resizes=tuple(c for c in whole if c.status.resizing is not None and _can_be_resized(c, on, defined)),
        stray_shares=tuple(sorted(found.shares - {c.id.short for c in found.containers if _may_need_volumes(c, on)})),
    )
    return todo.without_deletions() if found.in_doubt else todo


def _may_need_volumes(container: Container, on: set[ContainerId]) -> bool:
    """Whether its VM may run, or may be about to."""
    return container.phase is not ContainerPhase.EXITED or container.may_be_running or container.id in on


def _is_saved_or_restored(container: Container, on: set[ContainerId]) -> bool:
    status = container.status
    return status.renewing or ((status.saving or status.arriving) and container.id in on)


def _can_be_resized(container: Container, on: set[ContainerId], defined: set[ContainerId]) -> bool:
    return (
        container.id in on
        if container.is_running
        else container.phase is ContainerPhase.CREATED and container.id in defined
    )


def _is_orphan(container: Container, sandboxes: set[SandboxId], found: NodeState) -> bool:
    """Whether its sandbox was positively read as absent."""
    known = container.phase is not ContainerPhase.UNKNOWN and not found.in_doubt
    return known and container.sandbox_id not in sandboxes
