"""StopContainer: sends the command's stop signal, presses the ACPI power button, and destroys the VM after the grace
period."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from virtshim.containers.parts import ContainerParts
from virtshim.containers.record_exit import ExitRecorder
from virtshim.guest.boot_phases import BootProgress
from virtshim.guest.command import MAX_MESSAGE_BYTES, stop_signal_of, termination_file
from virtshim.guest.freeze import GuestFreezer
from virtshim.guest.operation import Action, paused_by_operator
from virtshim.guest.ports import GuestAgents, GuestOperations, TerminationFiles
from virtshim.model.container import Container, ContainerPhase, ExitReason
from virtshim.model.errors import Aborted, InternalError, ShimError, WrongState
from virtshim.model.ids import ContainerId
from virtshim.moves.renewing import VmStates
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.locks import LeaveOff, PodLocks, new_lock
from virtshim.vm.ports import VmPausing

log = structlog.get_logger(__name__)

# All in seconds. A booting guest may not listen to its power button yet, so virtshim presses the button repeatedly. At
# the same interval it checks whether the command still runs.
_PRESS_AGAIN = 5.0
# The most time that the guest agent gets to pass on a signal, and never more than half of the grace period.
_SIGNAL_LIMIT = 10.0
# The share of the grace period in which memory is saved. What does not fit is shut down in the rest.
_SAVING = 2 / 3
# For the end of a move whose guest was killed.
_BREAKING_OFF = 5.0
# For the last read of the termination message of a command that did not end.
_LAST_LOOK = 1.0
# To read the message from a guest whose command has just ended, so its agent works, and from any other guest.
_AFTER_A_COMMAND = 5.0
_BEFORE_A_STOP = 1.0


@dataclass(frozen=True, slots=True)
class TerminationMessages:
    """Reads a container's termination message from the guest before the VM ends, and writes it to kubelet's file."""

    records: Records
    guests: GuestOperations
    files: TerminationFiles

    def collect(self, container: Container, most_seconds: float) -> None:
        """Takes at most that time. If the guest has no message or does not answer, kubelet's file stays as it is."""
        wanted = termination_file(container.config.annotations, container.config.mounts)
        sandbox = self.records.sandboxes.get(container.sandbox_id)
        timeout = min(most_seconds, _AFTER_A_COMMAND if container.status.ending else _BEFORE_A_STOP)
        if wanted is None or sandbox is None or timeout <= 0:
            return
        try:
            message = self.guests.read_tail(container.id, wanted.guest, MAX_MESSAGE_BYTES, timeout)
            if message:
                self.files.write(wanted.host, sandbox.key.uid, message)
        except ShimError as exc:
            log.info("container.termination_message.none", container=container.id.short, why=str(exc))


@dataclass(slots=True)
class _Stop:
    """A stop that is under way. `until` is a time of the monotonic clock; a later caller may bring it forward."""

    until: float
    grace: float
    wake: threading.Event = field(default_factory=threading.Event)
    # Set when `until` was brought forward: the wait for the guest agent then checks the time again.
    hurry: LeaveOff = field(default_factory=LeaveOff)
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    # Times of the monotonic clock: the last press of the power button, and when the command was first seen to be gone.
    pressed: float | None = None
    gone: float | None = None
    # The command has received its signal.
    signalled: bool = False
    # The agent cannot pass on signals, or knows no command: only the power button is left.
    only_button: bool = False
    # Saves, renews or moves the VM instead, for an operator or another node. If that fails, the guest runs on.
    instead: Callable[[], None] | None = None
    # Whether the container runs on when `instead` has succeeded.
    runs_on: bool = False
    # Makes `instead` fail soon, unless it has succeeded already.
    break_off: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class StopContainer:
    records: Records
    clock: Clock
    locks: PodLocks
    parts: ContainerParts
    exits: ExitRecorder
    termination_messages: TerminationMessages
    boots: BootProgress
    guests: GuestAgents
    pausing: VmPausing
    freezer: GuestFreezer
    states: VmStates
    _lock: threading.Lock = field(default_factory=new_lock)
    _stops: dict[ContainerId, _Stop] = field(default_factory=dict)

    def stop(self, container: Container, grace: float) -> None:
        """Returns when the container no longer runs and its devices are free or known to be broken, because kubelet may
        then grant them again. `grace`: seconds, 0 ends the VM at once. Overlapping calls share one stop, and the
        shortest grace wins."""
        with self.locks.held_to_end(container.sandbox_id):  # waits for a StartContainer that is under way
            found = self.records.containers.get(container.id)
            # If the record cannot be read, the VM may run.
            may_run = found is not None and found.phase in (ContainerPhase.RUNNING, ContainerPhase.UNKNOWN)
            if found is not None and found.phase is ContainerPhase.CREATED:
                # A start may have failed after libvirt started the VM, and before the record said so.
                self.parts.hypervisor.destroy(found.domain_uuid, found.id)
            if found is not None and grace:
                self._note(found)
                self._let_go_on(found.id)
        if found is not None and may_run:
            self._stop(found, grace)
        self.parts.devices.releases.try_to_finish(container.id)

    def save(self, container: Container, limit: float, action: Action = Action.SAVE) -> None:
        """For an operator: saves the guest's memory within `limit` seconds, and ends the VM (SAVE), or gives the guest a new
        QEMU (RENEW). After an error the guest runs on, see `SaveVm.save` and `RenewVm.renew`. A stop that comes meanwhile
        waits for it, at most for its own grace period."""
        if self.boots.is_before_kernel(container):
            raise WrongState(
                f"the guest of container {container.id.short} has not begun to boot its kernel: there is nothing to save"
            )
        if action is Action.RENEW:
            self.instead_of_stops(container, lambda: self.states.renewing.renew(container, limit), runs_on=True)
        else:
            self.instead_of_stops(
                container, lambda: self.states.saving.save(container, limit, by_operator=True), runs_on=False
            )
        self.parts.devices.releases.try_to_finish(container.id)

    def instead_of_stops(
        self,
        container: Container,
        act: Callable[[], None],
        break_off: Callable[[], None] | None = None,
        *,
        runs_on: bool = True,
    ) -> None:
        """Calls `act`. A stop that arrives meanwhile waits until `act` has ended, at most for the stop's own grace
        period. With `break_off`, which makes `act` fail, the stop waits only for a part of its grace period. `runs_on`:
        whether the container still has to be stopped after `act` has succeeded."""
        with self._lock:
            if container.id in self._stops:
                raise WrongState(f"container {container.id.short} is being stopped")
            mine = _Stop(self.clock.monotonic(), 0.0, instead=act, runs_on=runs_on, break_off=break_off)
            self._stops[container.id] = mine
        self._lead(container, mine)

    def after_command(self, container: Container, grace: float) -> None:
        """Like `stop`, for a container whose command has a recorded end. A stop that is under way keeps its own grace
        period."""
        self._stop(container, grace, shorten=False)
        self.parts.devices.releases.try_to_finish(container.id)

    def _note(self, container: Container) -> None:
        """Records the stop before the guest is told, so that a later virtshim that finds the VM off knows about it. A
        failure does not fail the stop."""
        if not container.is_running or container.status.stop_asked or container.status.ending is not None:
            return
        try:
            self.records.containers.replace(container.asked_to_stop())
        except ShimError as exc:
            log.warning("container.stop.unrecorded", container=container.id.short, error=str(exc))

    def _let_go_on(self, wanted: ContainerId) -> None:
        """Resumes a guest that an operator paused or froze: it could not shut down, and would be killed after its
        grace."""
        container = self.records.containers.get(wanted)
        if container is None or not container.is_running or container.status.saving:
            return
        try:
            if container.status.paused:
                log.info("vm.resumed", container=wanted.short, why="it is being stopped")
                self.pausing.resume(container.domain_uuid)
                self.records.containers.replace(paused_by_operator(container, paused=False))
                self.exits.record_if_ended(wanted)
                self.freezer.after_resume(wanted)
            if container.status.frozen and not container.status.checkpointing:
                self.freezer.forget_hold(wanted)
                self.freezer.after_resume(wanted, was_paused=container.status.paused)
        except ShimError as exc:
            log.warning("vm.not_resumed", container=wanted.short, error=str(exc))

    def _stop(self, container: Container, grace: float, *, shorten: bool = True) -> None:
        until = self.clock.monotonic() + grace
        with self._lock:
            running = self._stops.get(container.id)
            if running is not None:
                if shorten and until < running.until:
                    running.until, running.grace = until, grace
                    running.hurry.set()
                running.wake.set()
            mine = None if running is not None else self._stops.setdefault(container.id, _Stop(until, grace))
        if mine is not None:
            self._lead(container, mine)
        elif running is not None and running.instead is not None:
            if not self._gives_way(running, grace):
                log.info("vm.destroy", container=container.id.short, grace_s=grace)
                message = f"killed: its memory was still being written after {grace:g} s"
                self.exits.note_kill(container.id, message)
                self.parts.hypervisor.destroy(container.domain_uuid, container.id)  # which ends the save, too
                if not running.done.wait(None if running.break_off is None else _BREAKING_OFF):
                    self._settled(
                        container, message
                    )  # the other node, or the disk, is slow; a stop does not wait for it
                    return
            if running.error is not None or running.runs_on:
                self._stop(container, max(0.0, until - self.clock.monotonic()))
        elif running is not None:
            running.done.wait()
            if running.error is not None:
                raise running.error

    def _gives_way(self, running: _Stop, grace: float) -> bool:
        """Waits for an action that runs instead of a stop. Returns whether the action ends within the grace period.
        Breaks a move off, because a move may take hours. The guest then shuts down in the rest of the grace period."""
        if running.break_off is None:
            return self.clock.wait(running.done, grace)
        early = grace * (1 - _SAVING)
        if self.clock.wait(running.done, early):
            return True
        running.break_off()
        return running.done.wait(grace - early)

    def kill(self, container: Container, message: str) -> None:
        """Ends the VM now, even if another call is stopping it. Waits for no other stop and for no devices, so the
        caller may hold the pod's lock. It may not do so for `stop`, which may join a stop that needs the lock."""
        self._record_own_end(container)
        self.states.receiving.break_off(container.id)
        self.parts.devices.unplug.before_kill(container, message)
        self.parts.hypervisor.destroy(container.domain_uuid, container.id)
        self._settled(container, message)

    def _record_own_end(self, container: Container) -> None:
        """Records the end of a VM that ended by itself a moment ago, because libvirt may report it as destroyed after
        virtshim's attempt. Does not wait for the pod's lock: its holder may be waiting for this VM's end. A failed
        write does not keep the VM alive."""
        with self.locks.held_soon(container.sandbox_id, 0) as held, contextlib.suppress(ShimError):
            if held:
                self.exits.record_if_ended(container.id)

    def _lead(self, container: Container, stop: _Stop) -> None:
        try:
            if stop.instead is not None:
                stop.instead()
            else:
                self._shut_down(container, stop)
        except Exception as exc:
            stop.error = exc
            raise
        finally:
            with self._lock:
                del self._stops[container.id]
            stop.done.set()

    def _shut_down(self, container: Container, stop: _Stop) -> None:
        message = ""
        if self._is_elsewhere(container, stop):
            return
        if stop.grace and self._is_saved(container, stop):
            return
        if stop.grace and self.boots.is_before_kernel(container):
            message = "killed: the guest had not begun to boot its kernel"
        elif not self._went_by_itself(container, stop):
            message = "killed: no grace period"
            if stop.grace:
                who = (
                    "container's command did not end"
                    if self._awaits_command(container, stop)
                    else "guest did not shut down"
                )
                message = f"killed: the {who} within {stop.grace:g} s"
                if stop.pressed is None:
                    self.termination_messages.collect(container, _LAST_LOOK)
        if message:
            log.info("vm.destroy", container=container.id.short, grace_s=stop.grace)
            self.exits.note_kill(container.id, message)
            self.parts.devices.unplug.before_kill(container, message)
            self.parts.hypervisor.destroy(container.domain_uuid, container.id)
        self._settled(container, message)

    def _is_elsewhere(self, container: Container, stop: _Stop) -> bool:
        """Ends a container whose guest runs or waits on another node. Returns whether it was such a container."""
        found = self.records.containers.get(container.id)
        if found is None or not self.states.is_elsewhere(found):
            return False
        self.states.receiving.break_off(container.id)
        message = "killed: the virtual machine had not arrived from its other node"
        if self.states.receiving.is_undecided(found):
            # QEMU may have the only copy of the guest's memory.
            if self._is_decided(found, stop):
                return self._is_over(found)
            message = "killed: its other node did not say in time whether the virtual machine has moved"
        self.exits.note_kill(container.id, message)
        self.parts.hypervisor.destroy(container.domain_uuid, container.id)
        self._settled(container, message)
        return True

    def _is_decided(self, container: Container, stop: _Stop) -> bool:
        """Whether it becomes known in a part of the grace period where the guest may run. If that is here, the rest is for its
        shutdown."""
        while stop.grace:
            stop.hurry.clear()
            left = max(0.0, stop.until - self.clock.monotonic()) * _SAVING
            if self.states.receiving.learn(container, left, stop.hurry):
                return True
            if not stop.hurry.is_set():
                break
        return False

    def _is_saved(self, container: Container, stop: _Stop) -> bool:
        """Saves the guest's memory, if stops of this container save it. Returns whether the memory is saved and the VM
        has ended."""
        found = self.records.containers.get(container.id)
        if found is None or not found.spec.save_on_stop or self.boots.is_before_kernel(found):
            return False
        ending = found.status.ending
        # If its command has ended, nothing would continue.
        if ending is not None and ending.reason is not ExitReason.SAVED:
            return False
        try:
            left = max(0.0, stop.until - self.clock.monotonic())
            self.states.saving.save(found, left * _SAVING, hurry=stop.hurry)
        except ShimError as exc:
            now = self.records.containers.get(container.id)
            if now is not None and now.status.ending is not None and now.status.ending.reason is ExitReason.SAVED:
                raise  # the state counts, and only the VM is not off yet: a repeated call ends it
            log.warning("vm.not_saved", container=container.id.short, error=str(exc))
            self.exits.note_unsaved(container.id, f"the guest's memory was not saved: {exc}")
            return False
        return True

    def _settled(self, container: Container, message: str) -> None:
        after = self.exits.record_if_ended(container.id, message)
        if after is not None and after.is_running:
            raise InternalError(
                f"the virtual machine of container {container.id} is still running after it was destroyed"
            )

    def _went_by_itself(self, container: Container, stop: _Stop) -> bool:
        """True once the VM is off, False if the grace period ends first."""
        domain = container.domain_uuid
        with self.parts.hypervisor.watching(domain) as changed:
            with self._lock:
                # One wait covers the domain's event, a caller with a shorter grace period and the command's end.
                stop.wake = changed
            while True:
                changed.clear()  # before the reads below, so that no later event is missed
                stop.hurry.clear()
                if self._is_over(container) or not self.parts.hypervisor.power(domain).is_on:
                    return True
                if self.clock.monotonic() >= stop.until:
                    return False
                self._ask_to_end(container, stop)
                self.clock.wait(changed, max(0.0, min(stop.until - self.clock.monotonic(), _PRESS_AGAIN)))

    def _is_over(self, container: Container) -> bool:
        """Whether another call has ended it. A VM that outlives its pods may then be the next container's."""
        now = self.records.containers.get(container.id)
        return now is None or now.phase in (ContainerPhase.EXITED, ContainerPhase.REMOVING)

    def _ask_to_end(self, container: Container, stop: _Stop) -> None:
        """Signals the command first, and presses the power button once the command has ended."""
        try:
            if self._awaits_command(container, stop):
                self._signal(container, stop)
        except Aborted:  # a caller shortened the grace period: look at the time again
            return
        except ShimError as exc:
            log.info("command.not_signalled", container=container.id.short, why=str(exc))
            stop.only_button = True
        if not self._awaits_command(container, stop):
            self._press(container, stop)

    def _awaits_command(self, container: Container, stop: _Stop) -> bool:
        """Whether a command runs and its end is worth waiting for."""
        found = self.records.containers.get(container.id)
        if found is None or stop.only_button:
            return False
        return found.status.command_begun and found.status.ending is None

    def _signal(self, container: Container, stop: _Stop) -> None:
        """Has the signal sent once (`guest/entrypoint.py`); later calls only ask whether the command runs. Raises ShimError."""
        now = self.clock.monotonic()
        left = stop.until - now
        number = 0 if stop.signalled else stop_signal_of(container)
        runs = self.guests.signal_entrypoint(container.id, number, min(_SIGNAL_LIMIT, left / 2), stop.hurry)
        if not runs:
            stop.gone = now if stop.gone is None else stop.gone
            stop.only_button = now - stop.gone >= _PRESS_AGAIN  # a recorded end would have arrived sooner
            return
        if not stop.signalled:
            log.info("command.signalled", container=container.id.short, signal=number, grace_s=stop.grace)
        stop.signalled, stop.gone = True, None

    def _press(self, container: Container, stop: _Stop) -> None:
        now = self.clock.monotonic()
        if stop.pressed is None:
            found = self.records.containers.get(container.id) or container
            self.termination_messages.collect(found, stop.until - now)
            now = self.clock.monotonic()
        elif now - stop.pressed < _PRESS_AGAIN:
            return
        log.info("vm.shutdown.asked", container=container.id.short, grace_s=stop.grace)
        self.parts.hypervisor.ask_to_shut_down(container.domain_uuid)
        stop.pressed = now
