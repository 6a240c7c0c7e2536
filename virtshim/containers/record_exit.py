"""The only place where a container becomes EXITED: it reads the VM's power state again, then records how it ended."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass, field

import structlog

from virtshim.containers.parts import ContainerParts
from virtshim.devices.health import with_devices
from virtshim.devices.values import GrantedDevices, PciFunction
from virtshim.guest.operation import paused_by_operator
from virtshim.guest.trouble_notices import TroubleNotices
from virtshim.metrics import observed
from virtshim.model.container import Container, Exit, ExitReason
from virtshim.model.errors import ShimError
from virtshim.model.ids import ContainerId
from virtshim.model.troubles import Trouble, TroubleKind, merged, text_of_troubles
from virtshim.model.vm import OffReason, PauseReason, Power, PowerState
from virtshim.store.ports import Records
from virtshim.streaming.ports import Streaming
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks
from virtshim.volumes.pod_volumes import end_takes_time

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ExitRecorder:
    """Records ends. Slow work, such as resetting the VM's devices, is started but not waited for."""

    records: Records
    clock: Clock
    locks: PodLocks
    parts: ContainerParts
    streaming: Streaming
    notices: TroubleNotices
    kill_reasons: dict[ContainerId, str] = field(default_factory=dict)
    unsaved: dict[ContainerId, str] = field(default_factory=dict)

    def note_kill(self, container: ContainerId, message: str) -> None:
        """Notes why virtshim is about to end this VM. Another thread may record the end before the caller returns."""
        self.kill_reasons[container] = message

    def note_unsaved(self, container: ContainerId, message: str) -> None:
        """Notes why the guest's memory was not saved. It is in the exit message, however the container ends."""
        self.unsaved[container] = message

    def record_if_ended(self, container: ContainerId, message: str = "") -> Container | None:
        """Records the end if the container is RUNNING in the record but its VM is off. Returns the current record, None
        if it is gone. `message`: why virtshim ended the VM, if it did."""
        found = self.records.containers.get(container)
        if found is not None:
            with self.locks.held(found.sandbox_id):
                found = self._settled(container, message)
        if found is None or not found.is_running:
            self.kill_reasons.pop(container, None)  # recorded, or too late to be recorded
            self.unsaved.pop(container, None)
        return found

    def _settled(self, container: ContainerId, message: str) -> Container | None:
        found = self.records.containers.get(container)
        if found is None or not found.is_running:
            return found
        message = message or self.kill_reasons.get(container, "")
        if found.status.moved_to and not message:  # it runs until somebody ends it
            return found
        domain = found.domain_uuid
        state = self.parts.hypervisor.power(domain)
        if not state.has_ended:
            # Somebody else may have resumed it, or virtshim was killed before it paused it.
            found = paused_by_operator(found, paused=found.status.paused and state.power is Power.PAUSED)
            stalled = trouble_of(state, found.granted, by_operator=found.status.paused)
            wrong = (
                *self.parts.devices.health.troubles(found),
                *self.parts.volumes.troubles(found),
                *_not_given(found.granted),
            )
            return self._standing(found, (stalled, *wrong) if stalled else wrong)
        now, oom_killed = self.clock.now_ns(), self._oom_killed(found, state)
        vm = exit_of(state, now, message, oom_killed=oom_killed, stop_asked=found.status.stop_asked)
        if found.status.arriving and not message:  # it has never run here
            vm = dataclasses.replace(
                vm, message=f"the virtual machine did not arrive from its other node: {vm.message}"
            )
        found = self._noted(found, state, vm)
        if state.is_on:  # the guest panicked, and its QEMU waits
            self.parts.hypervisor.destroy(domain, container)
        self.parts.volumes.end(found)
        self.finish_log(found)
        how = how_it_ended(found, vm)
        devices = text_of_troubles(self.parts.devices.health.troubles(found))
        unsaved = self.unsaved.get(container, "")
        how = dataclasses.replace(how, message=with_devices(how.message, [devices, unsaved]))
        ended = found.exited(how)
        self.records.containers.replace(ended)
        observed.meter().tell(observed.Exited(how.reason))
        self.streaming.end_container(container)
        self._drop_group(ended)
        if state.power is not Power.ABSENT:  # whoever removed it from libvirt may still run the VM
            self.drop_disk(ended)
        log.info(
            "container.exited",
            container=container.short,
            code=ended.exit.code if ended.exit else None,
            message=how.message,
        )
        if ended.owes_devices:
            self.parts.devices.releases.begin(container)
        return ended

    def _noted(self, container: Container, state: PowerState, vm: Exit) -> Container:
        """Notes the end before anything slow happens. If virtshim then destroys the VM, libvirt reports it as destroyed
        even if it had ended before, and an embedded libvirt forgets the reason when virtshim is killed. An absent
        domain may run elsewhere, so its end is not noted."""
        is_over = state.is_on or (state.power is Power.OFF and end_takes_time(container))
        if not is_over or container.status.ending is not None:
            return container
        noted = container.with_ending(vm)
        self.records.containers.replace(noted)
        return noted

    def _oom_killed(self, container: Container, state: PowerState) -> bool:
        """Must run before the cgroup is removed."""
        if state.reason is not OffReason.CRASHED:
            return False
        return self.parts.cgroups.oom_kills(container.id, container.spec.cgroup_parent) > 0

    def _drop_group(self, container: Container) -> None:
        """A failure is logged only, because RemoveContainer repeats this."""
        try:
            self.parts.cgroups.remove(container.id, container.spec.cgroup_parent, self.parts.timeout)
        except ShimError as exc:
            log.warning("cgroup.unremoved", container=container.id.short, error=str(exc))

    def drop_disk(self, container: Container) -> None:
        """Deletes the disk of a VM that is off: it does not start again, and kubelet may keep an ended container for
        long. A disk that stays with its pod is elsewhere and remains. A failure is logged only, because RemoveContainer
        repeats this."""
        try:
            self.parts.disks.delete(container.id, disk_alone=True)
        except ShimError as exc:
            log.warning("disk.unremoved", container=container.id.short, error=str(exc))

    def _standing(self, container: Container, troubles: tuple[Trouble, ...]) -> Container:
        """Reports what is wrong with a running container, then records it if it changed."""
        before = self.records.containers.get(container.id) or container
        if container.status.checkpointing or container.status.saving or container.status.arriving:
            return before
        self.notices.notice(before, troubles)
        now = container.with_troubles(troubles)
        if now == before:
            return before
        log.info("container.trouble", container=container.id.short, trouble=now.status.trouble or "none any more")
        self.records.containers.replace(now)
        return now

    def begin_end(self, container: ContainerId, how: Exit, why: tuple[Trouble, ...] = ()) -> Container | None:
        """Records how a running container is about to end, before its VM is ended: whoever then finds the VM off, even
        after a crash, knows the reason. `why` is reported first. Returns the record, None if the container does not
        run."""
        found = self.records.containers.get(container)
        if found is None:
            return None
        with self.locks.held(found.sandbox_id):
            found = self.records.containers.get(container)
            if found is None or not found.is_running:
                return None
            troubles = merged(found.status.troubles, why)
            self.notices.notice(found, troubles)
            ending = found.with_troubles(troubles).with_ending(how)
            if ending != found:  # each write waits for the disk
                self.records.containers.replace(ending)
            return ending

    def finish_log(self, container: Container) -> None:
        """A log that cannot be written (the disk is full) must not keep the container RUNNING."""
        try:
            # The log is not open if the VM ended while virtshim was down.
            self.parts.logs.open(container)
            self.parts.logs.finish(container)
        except ShimError as exc:
            log.warning("console.unfinished", container=container.id.short, error=str(exc))


def _not_given(granted: GrantedDevices) -> tuple[Trouble, ...]:
    return (Trouble(TroubleKind.CDI_LEFT_OUT, granted.notice),) if granted.notice else ()


def how_it_ended(container: Container, vm: Exit) -> Exit:
    """If the command's end is recorded, it decides, and the VM's end does not matter. Pure."""
    if container.status.moved_to:
        message = f"the virtual machine moved to node {container.status.moved_to}, where it runs on"
        return Exit(143, ExitReason.MOVED, vm.finished_at, message)
    return dataclasses.replace(container.status.ending, finished_at=vm.finished_at) if container.status.ending else vm


def trouble_of(state: PowerState, granted: GrantedDevices, *, by_operator: bool = False) -> Trouble | None:
    """Why a running VM makes no progress, None if it does. libvirt does not say why QEMU paused a VM by itself, for
    example after a device reported an error that cannot be corrected. Pure."""
    if state.power is not Power.PAUSED:
        return None
    if by_operator:
        return Trouble(TroubleKind.PAUSED, "paused by virtshim pause; virtshim resume continues it")
    match state.pause:
        case PauseReason.IO_ERROR:
            why = "paused: the node's file system is full; it resumes by itself once there is space"
            return Trouble(TroubleKind.DISK_FULL, why)
        case PauseReason.GUEST:
            return Trouble(TroubleKind.SUSPENDED, "its guest has suspended itself")
        case PauseReason.OTHER:
            why = "paused externally; virsh resume continues it"
            if any(isinstance(device, PciFunction) for device in granted.passthrough):
                why = (
                    "paused externally, or by QEMU after a PCI device error (see QEMU's log); virsh resume continues it"
                )
            return Trouble(TroubleKind.PAUSED_EXTERNALLY, why)


def exit_of(
    state: PowerState, at: int, message: str = "", *, oom_killed: bool = False, stop_asked: bool = False
) -> Exit:
    """Exit code and reason of a VM that has ended. `oom_killed`: the kernel killed QEMU because its cgroup ran out of
    memory. `stop_asked`: virtshim told the guest to end, so its work is unfinished and a Job must not count it as
    completed. Pure."""
    if state.power is Power.ABSENT:
        return Exit(255, ExitReason.UNKNOWN, at, message or "the virtual machine is gone from libvirt")
    if state.power is Power.CRASHED:
        return Exit(1, ExitReason.ERROR, at, "the guest panicked; see its console log")
    if oom_killed and state.reason is OffReason.CRASHED:
        return Exit(137, ExitReason.OOM_KILLED, at, "QEMU was killed: the container's cgroup ran out of memory")
    match state.reason:
        case OffReason.SHUTDOWN if stop_asked:
            return Exit(143, ExitReason.ERROR, at, message or "the guest shut down because the container was stopped")
        case OffReason.SHUTDOWN:
            return Exit(0, ExitReason.COMPLETED, at, message)
        case OffReason.CRASHED:
            return Exit(137, ExitReason.ERROR, at, message or "QEMU was killed or crashed; see its log")
        case OffReason.DESTROYED:
            return Exit(137, ExitReason.ERROR, at, message or "the virtual machine was destroyed externally")
        case OffReason.FAILED:
            return Exit(137, ExitReason.ERROR, at, message or "QEMU ended unexpectedly; see its log")
        case OffReason.UNKNOWN:
            return Exit(255, ExitReason.UNKNOWN, at, message or "the virtual machine ended for an unknown reason")


@dataclass(frozen=True, slots=True)
class VmEvents:
    """Handles power events. An event is a hint: the state is read again before anything is written."""

    records: Records
    exits: ExitRecorder

    def changed(self, domain: uuid.UUID) -> None:
        """Called for each life-cycle event of any domain, foreign ones included."""
        wanted = str(domain)
        for container in self.records.containers.all():
            if container.spec.domain_uuid == wanted and container.is_running:
                try:
                    self.exits.record_if_ended(container.id)
                except ShimError as exc:
                    log.warning("container.exit.unrecorded", container=container.id.short, error=str(exc))
