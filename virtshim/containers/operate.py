"""Pause, resume, reset, reboot, freeze and thaw of a running VM, by an operator's hand.

For kubelet a VM that stands still is a running container: it has no other word for one that has not ended, and would restart it
for any other. Each action is done under the pod's lock, so that it is either before or after any call of kubelet's; what waits
for the guest is not. None begins while a checkpoint is written, which pauses and freezes by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from virtshim.containers.record_exit import ExitRecorder
from virtshim.guest.freeze import GuestFreezer
from virtshim.guest.operation import Action, ActionTaken, Outcome, paused_by_operator
from virtshim.guest.ports import GuestOperations
from virtshim.model.container import Container
from virtshim.model.errors import Aborted, InvalidRequest, ShimError, WrongState
from virtshim.model.vm import PauseReason, Power
from virtshim.pods.lookup import existing_container
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.locks import PodLocks
from virtshim.vm.ports import Hypervisor, VmControl, VmPausing

# What operators have done to VMs: logged, remembered for a while, and told to who follows.

log = structlog.get_logger(__name__)

# A long day of an operator's. virtshim's log has them all.
_REMEMBERED: Final = 500


class ActionLog:
    """Thread-safe. In memory."""

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
        """Those after that time that are remembered, oldest first."""
        with self._changed:
            return [taken for taken in self._taken if taken.at > at]

    def follow(self, at: int, left: threading.Event) -> Iterator[ActionTaken]:
        """Those after that time, and then each as it happens, until `left` is set and `wake` called, or `close`. One who falls
        far behind misses some."""
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
        """Somebody who follows has left."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody follows any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


# Seconds. A guest whose file systems stand still cannot do much, and probes that write fail; more than these is no pause for a
# snapshot but a fault.
FREEZE_SECONDS: Final = 60
LONGEST_FREEZE: Final = 600
# For the guest's agent to take a request to restart.
_REBOOT_LIMIT: Final = 15.0


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

    def pause(self, wanted: Container) -> Outcome:
        """The record first: a virtshim that is killed in between finds the VM running, and forgets it (nobody was answered)."""
        with self._alone(wanted) as container:
            state = self.hypervisor.power(container.domain_uuid)
            if container.status.paused and state.power is Power.PAUSED:
                return Outcome(changed=False, message="it is paused already")
            _refuse_if_sleeping(container, state.power is Power.PAUSED and state.pause is PauseReason.GUEST)
            if container.status.stop_asked:
                raise WrongState(f"container {container.id.short} is being stopped: it is not paused")
            self.records.containers.replace(paused_by_operator(container, paused=True))
            if state.power is not Power.PAUSED:
                try:
                    self.pausing.pause(container.domain_uuid)
                except ShimError:
                    self._note_resumed(container)
                    raise
            message = "paused until it is resumed; kubelet sees a running container"
        self.log.add(Action.PAUSE, container, message)
        return Outcome(changed=True, message=message)

    def resume(self, wanted: Container) -> Outcome:
        """Also one that somebody else paused. The VM first: a virtshim that is killed in between finds it running."""
        with self._alone(wanted) as container:
            state = self.hypervisor.power(container.domain_uuid)
            if state.power is not Power.PAUSED:
                self._note_resumed(container)
                return Outcome(changed=False, message="it is not paused")
            _refuse_if_sleeping(container, state.pause is PauseReason.GUEST)
            self.pausing.resume(container.domain_uuid)
            self._note_resumed(container)
        self.freezer.after_resume(container.id)
        message = "goes on; its clock is set if it has a guest agent"
        self.log.add(Action.RESUME, container, message)
        return Outcome(changed=True, message=message)

    def reset(self, wanted: Container) -> Outcome:
        with self._alone(wanted) as container:
            self._refuse_restart(container, "reset")
            self.control.reset(container.domain_uuid)
        self.freezer.forget_hold(container.id)
        message = "its guest begins anew; what it had not written is lost"
        self.log.add(Action.RESET, container, message)
        return Outcome(changed=True, message=message)

    def reboot(self, wanted: Container) -> Outcome:
        """By the guest's agent. The power button with libvirt's promise to start the VM again is not taken: a guest that ignores
        it would be started again by its next shutdown, however much later."""
        with self._alone(wanted) as container:
            self._refuse_restart(container, "rebooted")
            if container.status.frozen:
                raise WrongState(
                    f"the file systems of container {container.id.short} are frozen; `virtshim thaw` first"
                )
        self.guests.reboot(container.id, _REBOOT_LIMIT)
        message = "its guest was asked to restart"
        self.log.add(Action.REBOOT, container, message)
        return Outcome(changed=True, message=message)

    def freeze(self, wanted: Container, seconds: int = 0) -> Outcome:
        """0 seconds: a minute."""
        if seconds > LONGEST_FREEZE:
            raise InvalidRequest(f"seconds {seconds}: a guest is frozen for {LONGEST_FREEZE} s at most")
        seconds = seconds or FREEZE_SECONDS
        with self._alone(wanted) as container:
            self._refuse_paused(container, "its guest cannot be asked")
            if self.freezer.is_held(container.id):
                self.freezer.hold_longer(container.id, seconds)
                return Outcome(changed=False, message=f"it is frozen already; {seconds} s from now on")
            if container.spec.command and not container.status.command_begun:
                raise WrongState(
                    f"the command of container {container.id.short} has not begun yet: its guest still boots; try again later"
                )
        count = self.freezer.hold(container, seconds)  # without the lock: the guest is waited for
        message = f"{count} file systems are frozen, for {seconds} s at most"
        self.log.add(Action.FREEZE, container, message)
        return Outcome(changed=True, message=message)

    def thaw(self, wanted: Container) -> Outcome:
        with self._alone(wanted) as container:
            self._refuse_paused(container, "it is thawed when it goes on")
            if not container.status.frozen:
                return Outcome(changed=False, message="it is not frozen")
        self.freezer.thaw_now(container.id)
        message = "its file systems go on"
        self.log.add(Action.THAW, container, message)
        return Outcome(changed=True, message=message)

    @contextlib.contextmanager
    def _alone(self, wanted: Container) -> Iterator[Container]:
        """The running container, with its pod's lock held."""
        with self.locks.held(wanted.sandbox_id):
            container = existing_container(self.records, wanted.id)
            if not container.is_running:
                raise WrongState(f"container {container.id.short} is {container.phase.value}: this is for a running VM")
            if container.status.checkpointing:
                raise Aborted(
                    f"a checkpoint of container {container.id.short} is being written, which pauses it; try again when it is done"
                )
            yield container

    def _refuse_restart(self, container: Container, what: str) -> None:
        self._refuse_paused(container, f"it cannot be {what}")
        if container.spec.command:
            raise WrongState(
                f"container {container.id.short} has a command, which runs once: with its guest {what} it would be lost, and the "
                "container would end; stop the container (kubelet makes a new one), or set virtshim.io/command: ignore"
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
