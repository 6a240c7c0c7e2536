"""StartContainer: boots the VM."""

from __future__ import annotations

import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass

import structlog

from virtshim.containers.parts import ContainerParts
from virtshim.containers.record_exit import ExitRecorder
from virtshim.devices.values import volume_of_both
from virtshim.guest.boot_phases import Starts
from virtshim.guest.entrypoint_runner import GuestFollowers
from virtshim.metrics import observed
from virtshim.model.container import Container, ContainerPhase, Exit, ExitReason
from virtshim.model.errors import ShimError, WrongState
from virtshim.model.sandbox import Sandbox
from virtshim.model.sizing import NodeLimits
from virtshim.moves.receiving import ReceiveVm
from virtshim.pods.lookup import existing_container
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.live import Live
from virtshim.system.locks import LeaveOff, PodLocks
from virtshim.system.rollback import Rollback
from virtshim.templates.warm_start import WarmStarts
from virtshim.volumes.volume_disks import anothers

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StartContainer:
    records: Records
    clock: Clock
    locks: PodLocks
    parts: ContainerParts
    guest: GuestFollowers
    exits: ExitRecorder
    sizes: Live[NodeLimits]
    starts: Starts
    receiving: ReceiveVm
    warm: WarmStarts

    def start(self, wanted: Container) -> None:
        """Returns when QEMU runs. The log file exists by then; the container's command starts later. A failed start
        leaves the container EXITED with reason StartError, as containerd does, and raises the error."""
        with (
            self.locks.held_while_waiting(wanted.sandbox_id) as leave_off,
            self.starts.ups.phase("start", wanted.sandbox_id, wanted.id),
        ):
            container = existing_container(self.records, wanted.id)
            sandbox = self._refuse_unless_startable(container)
            domain, may_have_run = container.domain_uuid, False
            try:
                self.parts.logs.open(container)
                # A device may have been unplugged since the container was created, and libvirt's error says little.
                self.parts.devices.claims.check(container.granted, container.status.size)
                with self._step(observed.Step.CGROUP, container):
                    self.parts.open_cgroup(container, sandbox, self.sizes.now)
                with self._step(observed.Step.VOLUMES, container):
                    self.parts.volumes.start(container, sandbox)
                given_up = f"container {container.id.short} is being stopped, so its start was given up"
                with self._step(observed.Step.LIBVIRT, container), leave_off.explained(given_up):
                    container = self._start(container, sandbox, leave_off)
                self.records.containers.replace(container)
                may_have_run = True
                container = self.receiving.go_on(container)
                if not (container.status.known_as or container.status.arriving or container.status.warm_started):
                    self.starts.boots.began(container)
                self.guest.follow(container)
            except Exception as exc:  # any error: no VM may stay on while its record says that it never started
                self._failed(container, domain, exc, may_have_run=may_have_run)
                raise
        log.info("container.started", container=container.id.short)
        try:
            # If the guest ended before the record said RUNNING, its event came too early.
            self.exits.record_if_ended(container.id)
        except ShimError as exc:  # the start itself succeeded
            log.warning("container.exit.unrecorded", container=container.id.short, error=str(exc))

    def _start(self, container: Container, sandbox: Sandbox, leave_off: LeaveOff) -> Container:
        if not container.spec.warm_start:
            return self.receiving.start(container, sandbox, leave_off)

        def boot(found: Container) -> Container:
            return self.receiving.start(found, sandbox, leave_off)

        def again() -> None:
            self.parts.open_cgroup(container, sandbox, self.sizes.now)

        return self.warm.start(container, sandbox, boot, again, leave_off)

    def _step(self, which: observed.Step, container: Container) -> AbstractContextManager[None]:
        return self.starts.ups.step(which, container.sandbox_id, container.id)

    def _refuse_unless_startable(self, container: Container) -> Sandbox:
        """Returns the container's sandbox. Raises WrongState."""
        if container.phase is not ContainerPhase.CREATED:
            raise WrongState(f"container {container.id} is {container.phase.value}: only a created one can be started")
        if not container.holds_its_claims:
            raise WrongState(f"the devices of container {container.id} went to a later container of its pod; remove it")
        sandbox = self.records.sandboxes.get(container.sandbox_id)
        if sandbox is None or not sandbox.is_ready:
            raise WrongState(f"the sandbox of container {container.id} is not ready")
        for other in self.records.containers.all():
            if other.spec.domain_uuid == container.spec.domain_uuid and other.created_at > container.created_at:
                raise WrongState(
                    f"the UUID of container {container.id} went to a later container of its pod; remove it"
                )
            if other.id == container.id or not other.may_be_running or not _share(container, other):
                continue
            if other.is_running:
                if other.sandbox_id != container.sandbox_id:
                    if (volume := volume_of_both(container.granted, other.granted)) is not None:
                        raise WrongState(anothers(volume, other, self.records.sandboxes.get(other.sandbox_id)))
                    raise WrongState(
                        f"container {other.id}, of another sandbox, still runs on the same disk; stop it first"
                    )
                raise WrongState(
                    f"container {other.id} ({other.name.name}) already runs in this pod: a pod is one virtual machine, "
                    "so its containers run one after another. Use one container, or init containers"
                )
            # The other container's VM should be off, and must not share the pod's network.
            self.parts.hypervisor.destroy(other.domain_uuid, other.id)
        return sandbox

    def _failed(self, container: Container, domain: uuid.UUID, error: Exception, *, may_have_run: bool) -> None:
        observed.meter().tell(observed.Exited(ExitReason.START_ERROR))
        log.warning("container.start.failed", container=container.id.short, error=str(error))
        ended = container.exited(Exit(128, ExitReason.START_ERROR, self.clock.now_ns(), str(error)))
        with Rollback() as undo:  # last in, first out
            undo.add("disk", lambda: self.exits.drop_disk(container) if undo.clean else None)
            # The devices are free once the VM is certainly off.
            undo.add("record", lambda: self.records.containers.replace(ended.with_claims(()) if undo.clean else ended))
            undo.add("console", lambda: self.parts.logs.finish(container))
            undo.add(
                "cgroup",
                lambda: self.parts.cgroups.remove(container.id, container.spec.cgroup_parent, self.parts.timeout),
            )
            undo.add("network", lambda: self.parts.cgroups.start_failed(container.sandbox_id, self.parts.timeout))
            undo.add("volumes", lambda: self.parts.volumes.end(container))
            if container.spec.vm and not may_have_run:
                undo.add("link", lambda: self.receiving.leave(container.id))
                undo.add("state", lambda: self.receiving.restoring.give_back(container) if undo.clean else None)
            undo.add("domain", lambda: self.parts.hypervisor.destroy(domain, container.id))


def _share(one: Container, other: Container) -> bool:
    """Whether the two share a network, a root disk, a volume or a UUID, so that only one of them may be on. QEMU's own
    lock on the disk file is the last resort."""
    if one.sandbox_id == other.sandbox_id or one.spec.domain_uuid == other.spec.domain_uuid:
        return True
    if volume_of_both(one.granted, other.granted) is not None:
        return True
    return one.spec.pod_disk != "" and one.spec.pod_disk == other.spec.pod_disk
