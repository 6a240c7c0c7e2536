"""Operators' actions on a running VM: pause, resume, reset, reboot, freeze, thaw, save and renew.

For kubelet a paused VM is a running container: CRI has no other state for one that has not ended, and kubelet would
restart it in any other state. Each action holds the pod's lock, so that it runs before or after each of kubelet's
calls, but not while it waits for the guest. No action starts while a checkpoint is written, because a checkpoint pauses
and freezes the VM itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import structlog

from virtshim.annotations.parse import VM_ANNOTATION
from virtshim.containers.record_exit import ExitRecorder
from virtshim.containers.stop_container import StopContainer
from virtshim.guest.freeze import GuestFreezer
from virtshim.guest.operation import Action, ActionTaken, Outcome, paused_by_operator
from virtshim.guest.ports import GuestOperations
from virtshim.model.container import Container
from virtshim.model.errors import Aborted, InvalidRequest, ShimError, WrongState
from virtshim.model.vm import PauseReason, Power
from virtshim.moves.values import unrenewable_vm, unsavable_vm
from virtshim.pods.lookup import existing_container
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks
from virtshim.vm.ports import Hypervisor, VmControl, VmPausing

# The log of operators' actions: virtshim logs them, remembers the latest, and streams them to followers.

log = structlog.get_logger(__name__)

# As many as an operator takes on a long day. virtshim's own log has all of them.
_REMEMBERED: Final = 500


class ActionLog:
    """The latest actions, in memory. Thread-safe."""

    def __init__(self, records: Records, clock: Clock) -> None:
        self._records = records
        self._clock = clock
        self._changed = threading.Condition()
        self._taken: deque[ActionTaken] = deque(maxlen=_REMEMBERED)
        self._count = 0
        self._closed = False

    def add(self, action: Action, container: Container, message: str) -> None:
        sandbox = self._records.sandboxes.get(container.sandbox_id)
        namespace, pod = (sandbox.key.namespace, sandbox.key.name) if sandbox else ("", "")
        taken = ActionTaken(self._clock.now_ns(), action, container.id, container.sandbox_id, namespace, pod, message)
        log.info(
            "vm.operated", action=action.value, container=container.id.short, pod=f"{namespace}/{pod}", message=message
        )
        with self._changed:
            self._taken.append(taken)
            self._count += 1
            self._changed.notify_all()

    def since(self, at: int) -> Sequence[ActionTaken]:
        """The remembered actions after that time, oldest first."""
        with self._changed:
            return [taken for taken in self._taken if taken.at > at]

    def follow(self, at: int, left: threading.Event) -> Iterator[ActionTaken]:
        """Yields the remembered actions after that time, then each new one. Ends after `close`, or once `left` is set
        and `wake` is called. A follower that falls far behind misses some."""
        with self._changed:
            seen, waiting = self._count, [taken for taken in self._taken if taken.at > at]
        while True:
            yield from waiting
            with self._changed:
                self._changed.wait_for(lambda: self._count > seen or self._closed or left.is_set())  # noqa: B023
                if self._closed or left.is_set():
                    return
                missed = min(self._count - seen, len(self._taken))
                waiting, seen = list(self._taken)[len(self._taken) - missed :], self._count

    def wake(self) -> None:
        """Wakes all followers, because one of them has left."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all followers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


# Seconds. A guest with frozen file systems can do little, and probes that write fail. A longer freeze is a fault, not a
# pause for a snapshot.
FREEZE_SECONDS: Final = 60
LONGEST_FREEZE: Final = 600
# Seconds for the guest agent to accept a reboot request.
_REBOOT_LIMIT: Final = 15.0
# Seconds to write a guest's memory: 60 GiB at 100 MiB/s. The guest is paused meanwhile.
SAVE_SECONDS: Final = 600.0
_SAVED: Final = "saved; its next container continues from here"


@dataclass(frozen=True, slots=True)
class VmActions:
    records: Records
    hypervisor: Hypervisor
    pausing: VmPausing
    control: VmControl
    guests: GuestOperations
    freezer: GuestFreezer
    locks: PodLocks
    log: ActionLog
    exits: ExitRecorder
    stopping: StopContainer

    def pause(self, wanted: Container) -> Outcome:
        """Writes the record first: a virtshim that is killed before it pauses the VM finds it running, and drops the
        note."""
        with self._alone(wanted) as container:
            state = self.hypervisor.power(container.domain_uuid)
            if container.status.paused and state.power is Power.PAUSED:
                return Outcome(changed=False, message="it is already paused")
            _refuse_if_sleeping(container, state.power is Power.PAUSED and state.pause is PauseReason.GUEST)
            if container.status.stop_asked:
                raise WrongState(f"container {container.id.short} is being stopped: it cannot be paused")
            self.records.containers.replace(paused_by_operator(container, paused=True))
            if state.power is not Power.PAUSED:
                try:
                    self.pausing.pause(container.domain_uuid)
                except ShimError:
                    self._note_resumed(container)
                    raise
        return self._done(Action.PAUSE, container, "paused until it is resumed; kubelet sees a running container")

    def resume(self, wanted: Container) -> Outcome:
        """Resumes a VM, whoever paused it. The VM comes first: a virtshim that is killed before it writes the record
        finds the VM running."""
        with self._alone(wanted) as container:
            state = self.hypervisor.power(container.domain_uuid)
            if state.power is not Power.PAUSED:
                self._note_resumed(container)
                return Outcome(changed=False, message="it is not paused")
            _refuse_if_sleeping(container, state.pause is PauseReason.GUEST)
            self.pausing.resume(container.domain_uuid)
            self._note_resumed(container)
        self.freezer.after_resume(container.id)
        return self._done(Action.RESUME, container, "resumed; its guest agent, if it has one, sets the clock")

    def reset(self, wanted: Container) -> Outcome:
        with self._alone(wanted) as container:
            self._refuse_restart(container, "reset")
            self.control.reset(container.domain_uuid)
        self.freezer.forget_hold(container.id)
        return self._done(Action.RESET, container, "its guest restarts; unwritten data is lost")

    def reboot(self, wanted: Container) -> Outcome:
        """Asks the guest's agent. libvirt could press the power button and start the VM again afterwards, but a guest
        that ignores the button would then be restarted by its next shutdown, however much later."""
        with self._alone(wanted) as container:
            self._refuse_restart(container, "rebooted")
            if container.status.frozen:
                raise WrongState(
                    f"the file systems of container {container.id.short} are frozen; `virtshim thaw` first"
                )
        self.guests.reboot(container.id, _REBOOT_LIMIT)
        return self._done(Action.REBOOT, container, "its guest was asked to restart")

    def freeze(self, wanted: Container, seconds: int = 0) -> Outcome:
        """0 seconds: a minute (`FREEZE_SECONDS`)."""
        if seconds > LONGEST_FREEZE:
            raise InvalidRequest(f"seconds {seconds}: a guest is frozen for {LONGEST_FREEZE} s at most")
        seconds = seconds or FREEZE_SECONDS
        with self._alone(wanted) as container:
            self._refuse_paused(container, "its guest cannot answer")
            if self.freezer.is_held(container.id):
                self.freezer.hold_longer(container.id, seconds)
                return Outcome(changed=False, message=f"it is already frozen; {seconds} s from now on")
            if container.spec.command and not container.status.command_begun:
                raise WrongState(
                    f"the command of container {container.id.short} has not begun yet: its guest still boots; try again later"
                )
        count = self.freezer.hold(container, seconds)  # without the lock, because this waits for the guest
        message = f"{count} file system{'s are' if count != 1 else ' is'} frozen, for {seconds} s at most"
        return self._done(Action.FREEZE, container, message)

    def thaw(self, wanted: Container) -> Outcome:
        with self._alone(wanted) as container:
            self._refuse_paused(container, "its file systems are thawed when it is resumed")
            if not container.status.frozen:
                return Outcome(changed=False, message="it is not frozen")
        self.freezer.thaw_now(container.id)
        return self._done(Action.THAW, container, "its file systems are thawed")

    def save(self, wanted: Container) -> Outcome:
        """Ends the VM with its memory saved, as a stop does. A VM whose stops do not save is saved as well, if it can be."""
        return self._saved(wanted, Action.SAVE, _SAVED)

    def save_all(self, limit: float) -> Sequence[tuple[Container, str]]:
        """For the shutdown of the node: saves each running VM whose stops save, within `limit` seconds and all at the same time.
        Returns the containers, each with "" or the reason why its guest runs on."""
        wanted = [one for one in self.records.containers.all() if one.is_running and one.spec.save_on_stop]

        def save(container: Container) -> str:
            try:
                self._saved(container, Action.SAVE, _SAVED, limit)
            except ShimError as exc:
                log.warning("vm.not_saved", container=container.id.short, error=str(exc))
                return str(exc)
            return ""

        with ThreadPoolExecutor(max_workers=max(1, len(wanted)), thread_name_prefix="save") as threads:
            return list(zip(wanted, threads.map(save, wanted), strict=True))

    def renew(self, wanted: Container) -> Outcome:
        """Gives the guest a new QEMU. It is paused meanwhile, and the container continues."""
        return self._saved(wanted, Action.RENEW, "its guest continues in a new QEMU")

    def _saved(self, wanted: Container, action: Action, message: str, limit: float = SAVE_SECONDS) -> Outcome:
        with self._alone(wanted) as container:
            self._refuse_unsavable(container, action)
        try:
            self.stopping.save(container, limit, action)  # without the lock, because this takes long
        except WrongState:  # it did not begin
            raise
        except ShimError:
            self.freezer.after_resume(container.id)  # the guest runs on, and its clock stopped
            raise
        return self._done(action, container, message)

    def _done(self, action: Action, container: Container, message: str) -> Outcome:
        self.log.add(action, container, message)
        return Outcome(changed=True, message=message)

    def _refuse_unsavable(self, container: Container, action: Action) -> None:
        spec, status = container.spec, container.status
        done = f"{action.value}d" if action is Action.SAVE else f"{action.value}ed"
        if not spec.vm:
            raise WrongState(
                f"the VM of container {container.id.short} ends with its pod; only a VM whose pod has the annotation "
                f"{VM_ANNOTATION} can be {done}"
            )
        if what := unsavable_vm(spec) if action is Action.SAVE else unrenewable_vm(spec):
            raise WrongState(f"container {container.id.short} cannot be {done} with {what}")
        if status.stop_asked or status.ending is not None:
            raise WrongState(f"container {container.id.short} is ending: it cannot be {done}")
        self._refuse_paused(container, f"it cannot be {done}")
        if status.frozen:
            raise WrongState(f"the file systems of container {container.id.short} are frozen; `virtshim thaw` first")

    @contextlib.contextmanager
    def _alone(self, wanted: Container) -> Iterator[Container]:
        """Yields the running container and holds its pod's lock."""
        with self.locks.held(wanted.sandbox_id):
            container = existing_container(self.records, wanted.id)
            if not container.is_running:
                raise WrongState(
                    f"container {container.id.short} is {container.phase.value}: only a running VM can do this"
                )
            if container.status.renewing:
                raise Aborted(f"container {container.id.short} is getting a new QEMU; try again later")
            if container.unusable:
                raise WrongState(f"container {container.id.short} {container.unusable}")
            if container.status.checkpointing:
                raise Aborted(
                    f"a checkpoint of container {container.id.short} is being written, which pauses the VM; try again later"
                )
            yield container

    def _refuse_restart(self, container: Container, what: str) -> None:
        self._refuse_paused(container, f"it cannot be {what}")
        if container.spec.command:
            raise WrongState(
                f"container {container.id.short} has a command, which runs once: if its guest is {what}, the command is lost and "
                "the container ends; stop the container (kubelet makes a new one), or set virtshim.io/command: ignore"
            )

    def _refuse_paused(self, container: Container, why: str) -> None:
        state = self.hypervisor.power(container.domain_uuid)
        if state.power is Power.PAUSED:
            _refuse_if_sleeping(container, state.pause is PauseReason.GUEST)
            raise WrongState(f"container {container.id.short} is paused: {why}; `virtshim resume` first")

    def _note_resumed(self, container: Container) -> None:
        now = existing_container(self.records, container.id)
        if now.status.paused or now.status.trouble:
            self.records.containers.replace(paused_by_operator(now, paused=False))
            self.exits.record_if_ended(now.id)


def _refuse_if_sleeping(container: Container, is_sleeping: bool) -> None:
    if is_sleeping:
        raise WrongState(
            f"the guest of container {container.id.short} has suspended itself; wake it with `virsh dompmwakeup`, or stop the "
            "container (kubelet makes a new one)"
        )
