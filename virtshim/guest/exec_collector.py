"""Collects a command's whole output for a caller that waits for its end."""

from __future__ import annotations

import select
import threading
import time
from contextlib import suppress

from virtshim.guest.command import CommandResult
from virtshim.guest.guest_exec import GuestVm, RunningCommand
from virtshim.guest.wait import CancellableDeadline
from virtshim.model.errors import ShimError, Unavailable
from virtshim.streaming.ports import OutStream
from virtshim.system.rate_limits import ReadPace, TokenBucket

# When to stop reading the output, and when to ask whether the command still runs. Pure; times are monotonic seconds.

# A process that the command left behind holds its streams open. Output from before the command's end has arrived after
# this time, unless the guest is too busy to run the relays. Another process must therefore have run in the guest since.
_QUIET_AFTER_EXIT = 0.5
_LONGEST_AFTER_EXIT = 5.0
_AFTER_TURN = 0.1
# After this silence the agent is asked whether the command has started, which takes milliseconds.
_CHECK_START = 1.0
# Output that was under way when the command was found gone has arrived after this time.
_LAST_BYTES = 0.5


class SilenceTracker:
    def __init__(self, now: float, check_after: float) -> None:
        """`check_after`: the silence in seconds after which the agent is asked."""
        self._check_after = check_after
        self._heard = now
        self._checked = now
        self._exited: float | None = None
        self._turned: float | None = None
        self._gone: float | None = None

    def heard(self, now: float, *, exited: bool) -> None:
        """Called when data has arrived. `exited`: whether the command's exit was in it, or before."""
        self._heard = now
        if exited and self._exited is None:
            self._exited = now

    def gone(self, now: float) -> None:
        """Called when the agent says that nothing of the command runs any more."""
        if self._gone is None:
            self._gone = now

    def turn_due(self, now: float) -> bool:
        """Whether the end depends on the guest having run another process since the last output."""
        if self._exited is None:
            return False
        if now - self._exited >= _LONGEST_AFTER_EXIT:
            return self._turned is None
        return now - self._heard >= _QUIET_AFTER_EXIT and (self._turned is None or self._turned < self._heard)

    def turned(self, now: float) -> None:
        """Called when a process that was started for this purpose has ended, or the guest does not answer."""
        self._turned = now

    def check_due(self, now: float, *, started: bool) -> bool:
        """Whether the agent should be asked now. Answers True only once for each time that it is due."""
        limit = self._check_after if started else _CHECK_START
        if self._gone is not None or now - max(self._heard, self._checked) < limit:
            return False
        self._checked = now
        return True

    def over(self, now: float) -> bool:
        """Whether no more output is expected."""
        quiet = now - self._heard
        if self._gone is not None and now - self._gone >= _LAST_BYTES and quiet >= _LAST_BYTES:
            return True
        if self._exited is None or self._turned is None:
            return False
        if now - self._exited >= _LONGEST_AFTER_EXIT:
            return now - self._turned >= _AFTER_TURN
        return self._turned >= self._heard and now - self._turned >= _AFTER_TURN


_PIECE = 1 << 18
# Bytes a second of output that nobody will see. The command keeps running, but takes little processor time.
_UNSEEN = 16 << 20
# The check whether a command still runs must not delay its output for long.
_CHECK_SECONDS = 2.0

VM_ENDED = "the virtual machine ended while the command ran"


class OutputMemory:
    """The memory for the output of all commands that are being collected. Each may grow up to half of what is left, so
    the next one always has room. Any thread may use it."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._lock = threading.Lock()

    def take(self, wanted: int, mine: int) -> int:
        """How many of `wanted` bytes a command that holds `mine` may keep."""
        with self._lock:
            granted = max(0, min(wanted, (self._left - 2 * mine) // 3))
            self._left -= granted
        return granted

    def give_back(self, size: int) -> None:
        with self._lock:
            self._left += size


class Collector:
    """Keeps up to `limit` bytes of each stream, as far as there is `memory`. Further output is read and thrown away, so
    that the command continues."""

    def __init__(self, vm: GuestVm, running: RunningCommand, limit: int, memory: OutputMemory) -> None:
        self._vm = vm
        self._running = running
        self._limit = limit
        self._memory = memory
        self._held = 0
        self._kept = {stream: bytearray() for stream in OutStream}
        now = time.monotonic()
        self._silence = SilenceTracker(now, vm.limits.silence)
        self._pace = ReadPace(now)
        self._unseen = TokenBucket(_UNSEEN, _UNSEEN, now)

    def result(self, deadline: CancellableDeadline) -> CommandResult:
        """Returns when the command has ended, and frees the memory. Called once. Errors: DeadlineExceeded, Aborted, Unavailable
        (the VM ended), InternalError."""
        try:
            return self._result(deadline)
        finally:
            self._memory.give_back(self._held)

    def _result(self, deadline: CancellableDeadline) -> CommandResult:
        running, output = self._running, self._running.output
        streams = {end.fileno(): (stream, end) for stream, end in running.outputs.items()}
        poller = select.poll()
        for number in streams:
            poller.register(number, select.POLLIN)
        while not output.complete:
            wait = deadline.slice("the command's end")
            for number, _ in poller.poll(wait * 1000):
                stream, end = streams[number]
                data = end.recv(_PIECE)
                if not data:
                    raise Unavailable(VM_ENDED)
                if pause := self._keep(stream, data):
                    deadline.cancelled.wait(min(pause, deadline.slice("the command's end")))
            if self._over():
                break
        if output.code is None:
            raise running.lost()
        return CommandResult(output.code, bytes(self._kept[OutStream.STDOUT]), bytes(self._kept[OutStream.STDERR]))

    def _keep(self, stream: OutStream, data: bytes) -> float:
        """Stores the data. Returns the seconds to wait before the next read."""
        now = time.monotonic()
        for piece in self._running.output.feed(stream, data):
            kept = self._kept[piece.stream]
            room = self._memory.take(min(len(piece.data), self._limit - len(kept)), self._held)
            self._held += room
            kept += piece.data[:room]
            if len(piece.data) > room:
                self._unseen.spend(len(piece.data) - room, now)
        self._silence.heard(now, exited=self._running.output.exited)
        return max(self._pace.pause_after(len(data), now), self._unseen.wait(now))

    def _over(self) -> bool:
        now = time.monotonic()
        if self._silence.check_due(now, started=self._running.output.started):
            with suppress(ShimError):  # the guest may be busy; the command's own end will arrive
                if self._vm.is_gone(self._running, CancellableDeadline.after(_CHECK_SECONDS)):
                    self._silence.gone(time.monotonic())
        if self._silence.turn_due(now):
            self._vm.run_noop()
            self._silence.turned(time.monotonic())
            return False
        return self._silence.over(now)
