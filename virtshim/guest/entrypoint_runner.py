"""Starts the containers' entrypoints when the guest agent is up, and follows them until they exit, which ends their
VM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from virtshim.containers.record_exit import ExitRecorder
from virtshim.containers.stop_container import StopContainer
from virtshim.guest.command import entrypoint_command, exit_of_entrypoint, failed_start, lost
from virtshim.guest.ports import EntrypointListeners, GuestAgents
from virtshim.guest.set_up import GuestSetUp, NotSetUp
from virtshim.logs.ports import EntrypointLogs
from virtshim.model.container import Container, Exit, ProcessUser
from virtshim.model.errors import Aborted, DeadlineExceeded, ShimError, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.troubles import Trouble
from virtshim.pods.lookup import running
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.live import Live
from virtshim.system.locks import PodLocks
from virtshim.system.rate_limits import LOG_BURST, LOG_RATE, ReadPace, TokenBucket
from virtshim.system.threads import ContainerThreads

log = structlog.get_logger(__name__)

# All in seconds. A silent command is polled less and less often, so its output is at most this late. A poll takes 0.4
# ms of processor time, so twenty silent commands take a hundredth of a core.
_SOONEST, _LATEST = 0.1, 1.0
# The first polls of a command that has just begun: most commands say something soon.
_FIRST = 0.02
# Polls that find little output: how many a second, and how many at once. They limit the cost of a command that writes
# line by line.
_LOOKS, _LOOKS_AT_ONCE = 20.0, 100.0
# Pause before a guest that does not answer is asked again.
_AGAIN = 2.0
# One wait for the agent, after which the VM is checked.
_AGENT_SLICE = 10.0
# The same, for the scripts that set sysctls, load a module and mount the volumes.
_SET_UP_SLICE = 60.0
# After this long without output, the guest is asked whether the command still exists.
_SILENCE = 30.0
# Processes that the command left behind may hold its streams. Output from before its end has arrived after this long.
_QUIET_AFTER_EXIT = 2.0
_LONGEST_AFTER_EXIT = 30.0
# The same for a command that is being stopped, whose exit must be recorded before its grace is over.
_QUIET_WHEN_STOPPED, _LONGEST_WHEN_STOPPED = 0.5, 2.0
# A VM whose command has ended only has to shut down.
_GRACE = 10.0


@dataclass(slots=True)
class _FollowState:
    """One thread's view of its command; times are of the monotonic clock. `since`: when waiting for the agent began. A
    restart of virtshim begins again, because the wall clock in the record may have been set since."""

    since: float
    heard: float
    allowance: TokenBucket
    pace: ReadPace
    exited: float | None = None
    pause: float = _SOONEST
    # The last poll. Timeouts do not advance while an operator has paused the VM.
    looked: float = 0.0

    def stand_still(self, now: float) -> None:
        self.since += now - self.looked
        self.heard += now - self.looked


@dataclass(frozen=True, slots=True)
class EntrypointRunner:
    """`agent_timeout`: seconds from the container's start to the agent's first answer. One thread for each command."""

    records: Records
    clock: Clock
    locks: PodLocks
    guests: GuestAgents
    logs: EntrypointLogs
    listeners: EntrypointListeners
    guest_set_up: GuestSetUp
    stop: StopContainer
    exits: ExitRecorder
    agent_timeout: Live[float]
    _threads: ContainerThreads = field(default_factory=lambda: ContainerThreads("command"))

    def follow(self, container: Container) -> None:
        """Follows the entrypoint of this running container, if it has one, or finishes its recorded end. Returns at
        once."""
        if not container.spec.command and container.status.ending is None:
            return
        self._threads.start(container.id, lambda: self._follow(container.id), beside_earlier=True)

    def close(self) -> None:
        """Stops following. The commands keep running, and the next process follows them."""
        self._threads.close()

    # --- below: the thread of one command

    def _follow(self, wanted: ContainerId) -> None:
        now = self.clock.monotonic()
        state = _FollowState(
            now, now, TokenBucket(LOG_RATE, LOG_BURST, now), ReadPace(now, _LOOKS, _LOOKS_AT_ONCE), looked=now
        )
        last_error = ""
        try:
            while not self._threads.closing.is_set() and (container := running(self.records, wanted)) is not None:
                try:
                    pause = self._step(container, state)
                except ShimError as exc:
                    pause = _AGAIN
                    if str(exc) != last_error and running(self.records, wanted) is not None:
                        last_error = str(exc)
                        expected = isinstance(exc, DeadlineExceeded | Aborted)  # the guest boots, or the daemon stops
                        (log.info if expected else log.warning)(
                            "command.waiting", container=wanted.short, error=last_error
                        )
                except Exception as exc:  # the edge of the thread: nobody else would hear of the command's end
                    pause = _AGAIN
                    if repr(exc) != last_error:
                        last_error = repr(exc)
                        log.exception("command.step_crashed", container=wanted.short)
                self.clock.wait(self._threads.closing, pause)
        finally:
            if running(self.records, wanted) is None:
                self.listeners.forget(wanted)
            if self.records.containers.get(wanted) is None:
                self.guests.forget(wanted)  # a request may have been under way when it was removed

    def _step(self, container: Container, state: _FollowState) -> float:
        """Returns the seconds to wait before the next poll."""
        now = self.clock.monotonic()
        stands = container.status.paused or container.unusable
        if stands:
            state.stand_still(now)
        state.looked = now
        if stands:
            return _AGAIN
        if container.status.ending is not None:
            self.stop.after_command(container, _GRACE)
            return _AGAIN
        if not container.status.command_begun:
            if container.status.stop_asked:  # a container that is to end does not start its command
                return _AGAIN
            self._begin(container, state)
            return 0.0
        return self._listen(container, state)

    def _begin(self, container: Container, state: _FollowState) -> None:
        patience = self.agent_timeout.now
        left = patience - (self.clock.monotonic() - state.since)
        try:
            command = entrypoint_command(container)
            self.guest_set_up.make(container, min(max(left, 1.0), _SET_UP_SLICE), self._threads.closing)
            self.guests.start_entrypoint(
                container.id, command, min(max(left, 1.0), _AGENT_SLICE), self._threads.closing
            )
        except (DeadlineExceeded, Unavailable, Aborted) as exc:
            status = (running(self.records, container.id) or container).status
            paused = status.paused or status.saving or status.arriving
            if left > _AGENT_SLICE or isinstance(exc, Aborted) or paused:
                raise
            why = f"{exc} (waited {patience:g} s, vm.agent_timeout)"
            self._end(container, failed_start(why, self.clock.now_ns()))
        except NotSetUp as exc:
            self._end(container, failed_start(str(exc), self.clock.now_ns()), exc.troubles)
        except ShimError as exc:
            self._end(container, failed_start(str(exc), self.clock.now_ns()))
        else:
            state.heard = self.clock.monotonic()  # there was no output while the guest booted
            state.pause = _FIRST
            log.info("command.begun", container=container.id.short)
            self._write(container.id, Container.with_command_begun)

    def _listen(self, container: Container, state: _FollowState) -> float:
        before = self.logs.read_to(container.id)
        progress = self.guests.progress(container.id, before)
        now = self.clock.monotonic()
        if progress.output or progress.read_to != before:
            state.allowance.spend(self.logs.write(container.id, progress.output, progress.read_to), now)
            state.heard, state.pause = now, _SOONEST
            self.listeners.publish(container.id, progress.output)
        if container.status.user is None and (user := self.guests.entrypoint_user(container.id)) is not None:
            self._write(container.id, lambda found: _began_as(found, user))
        if progress.ended and state.exited is None:
            state.exited = state.heard = now
        if state.exited is not None:
            if progress.read_to.over or _is_quiet(container, now - state.heard, now - state.exited):
                self._end(container, exit_of_entrypoint(progress, self.clock.now_ns()))
                return 0.0
            return _SOONEST
        if now - state.heard >= _SILENCE:
            if not self.guests.entrypoint_exists(container.id):
                self._end(container, lost(self.clock.now_ns()))
                return 0.0
            state.heard = now
        if progress.output:  # a command whose log is full must wait
            found = sum(len(piece.data) for piece in progress.output)
            return max(state.allowance.wait(now), state.pace.pause_after(found, now))
        soon = container.status.stop_asked or self.listeners.has_clients(container.id)
        latest = _SOONEST if soon else _LATEST
        state.pause = min(state.pause * 1.5, latest)
        return state.pause

    def _end(self, container: Container, how: Exit, why: tuple[Trouble, ...] = ()) -> None:
        log.info("command.ended", container=container.id.short, code=how.code, message=how.message)
        self.exits.begin_end(container.id, how, why)
        self.listeners.ended(container.id, how.code)

    def _write(self, container: ContainerId, change: Callable[[Container], Container]) -> None:
        found = self.records.containers.get(container)
        if found is None:
            return
        with self.locks.held(found.sandbox_id):
            if (now := running(self.records, container)) is not None:
                self.records.containers.replace(change(now))


@dataclass(frozen=True, slots=True)
class GuestFollowers:
    """Threads that act in a running container's guest: they set it up, and run its command."""

    entrypoints: EntrypointRunner
    set_up: GuestSetUp

    def follow(self, container: Container) -> None:
        """Returns at once."""
        self.entrypoints.follow(container)
        if not container.status.arriving:  # the event of its resumption begins the set-up
            self.set_up.follow(container)


def _began_as(container: Container, user: ProcessUser) -> Container:
    return dataclasses.replace(container, status=dataclasses.replace(container.status, user=user))


def _is_quiet(container: Container, silent: float, exited: float) -> bool:
    """Whether a command that has ended has no more output. Seconds since its last output, and since its exit. Pure."""
    if container.status.stop_asked:
        return silent >= _QUIET_WHEN_STOPPED or exited >= _LONGEST_WHEN_STOPPED
    return silent >= _QUIET_AFTER_EXIT or exited >= _LONGEST_AFTER_EXIT
