"""The one place where a container becomes EXITED: reads the power again, then writes how it ended."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

import structlog

from virtshim.domain.container import Container, ContainerPhase, Exit, ExitReason
from virtshim.domain.errors import ShimError
from virtshim.domain.ids import ContainerId
from virtshim.domain.vm import OffReason, Power, PowerState
from virtshim.ports import Clock, Consoles, Hypervisor, Records, Streaming, VmGroups
from virtshim.services.inflight import PodLocks

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Exits:
    """`timeout`: seconds for a call to tapmanager."""

    records: Records
    hypervisor: Hypervisor
    consoles: Consoles
    clock: Clock
    locks: PodLocks
    streaming: Streaming
    groups: VmGroups
    timeout: float
    ended_by_us: dict[ContainerId, str] = field(default_factory=dict)

    def announce(self, container: ContainerId, message: str) -> None:
        """Why we are about to end this VM. Its power event may be settled on another thread before we are back."""
        self.ended_by_us[container] = message

    def settle(self, container: ContainerId, message: str = "") -> Container | None:
        """If the container is RUNNING in the record but its VM is off, records the end. Returns the record as it is now,
        None if it is gone. `message` tells what we did to it, if we ended it."""
        found = self.records.containers.get(container)
        if found is None:
            return None
        with self.locks.held(found.sandbox_id):
            found = self.records.containers.get(container)
            if found is None or found.phase is not ContainerPhase.RUNNING:
                return found
            state = self.hypervisor.power(uuid.UUID(found.domain_uuid))
            if state.is_on:
                return found
            self.finish_log(found)
            message = message or self.ended_by_us.pop(container, "")
            ended = found.exited(exit_of(state, self.clock.now_ns(), message))
            self.records.containers.replace(ended)
            self.streaming.end_container(container)
            self._drop_group(ended)
            log.info(
                "container.exited",
                container=container.short,
                code=ended.exit.code if ended.exit else None,
                message=message,
            )
            return ended

    def _drop_group(self, container: Container) -> None:
        """RemoveContainer repeats it."""
        try:
            self.groups.remove(container.id, container.cgroup_parent, self.timeout)
        except ShimError as exc:
            log.warning("cgroup.unremoved", container=container.id.short, error=str(exc))

    def finish_log(self, container: Container) -> None:
        """A log that cannot be written (the disk is full) must not keep the container RUNNING."""
        try:
            # Not open if it ended while virtshim was away.
            self.consoles.open(container.id, container.log_file, container.log_directory)
            self.consoles.finish(container.id)
        except ShimError as exc:
            log.warning("console.unfinished", container=container.id.short, error=str(exc))


def exit_of(state: PowerState, at: int, message: str = "") -> Exit:
    """Exit code and reason of a VM that is off. Pure."""
    if state.power is Power.ABSENT:
        return Exit(255, ExitReason.UNKNOWN, at, message or "the virtual machine is gone from libvirt")
    match state.reason:
        case OffReason.SHUTDOWN:
            return Exit(0, ExitReason.COMPLETED, at, message)
        case OffReason.CRASHED:
            return Exit(1, ExitReason.ERROR, at, message or "the guest crashed (kernel panic)")
        case OffReason.DESTROYED:
            return Exit(137, ExitReason.ERROR, at, message or "the virtual machine was destroyed from outside")
        case OffReason.FAILED:
            return Exit(137, ExitReason.ERROR, at, message or "QEMU ended unexpectedly; its log tells why")
        case OffReason.UNKNOWN:
            return Exit(255, ExitReason.UNKNOWN, at, message or "the virtual machine ended and nobody knows how")
