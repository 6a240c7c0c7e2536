"""When to stop reading a command's output, and when to ask whether it still runs. Pure; times are monotonic seconds."""

from __future__ import annotations

# A process that the command left behind holds its streams open: what was written before the command ended has long come, unless
# the guest is so busy that its relays do not get to run. So another process must have had its turn there in between.
_QUIET_AFTER_EXIT = 0.5
_LONGEST_AFTER_EXIT = 5.0
_AFTER_TURN = 0.1
# Silence after which the agent is asked whether the command has started, which takes milliseconds.
_CHECK_START = 1.0
# What was on its way when the command was found gone has arrived by then.
_LAST_BYTES = 0.5


class SilenceTracker:
    def __init__(self, now: float, check_after: float) -> None:
        """The agent is asked after so many seconds of silence."""
        self._check_after = check_after
        self._heard = now
        self._checked = now
        self._exited: float | None = None
        self._turned: float | None = None
        self._gone: float | None = None

    def heard(self, now: float, *, exited: bool) -> None:
        """Something came; `exited`: the command's exit was in it, or before."""
        self._heard = now
        if exited and self._exited is None:
            self._exited = now

    def gone(self, now: float) -> None:
        """The agent says that nothing of the command runs any more."""
        if self._gone is None:
            self._gone = now

    def turn_due(self, now: float) -> bool:
        """True while the end depends on whether the guest has scheduled other processes since the last output."""
        if self._exited is None:
            return False
        if now - self._exited >= _LONGEST_AFTER_EXIT:
            return self._turned is None
        return now - self._heard >= _QUIET_AFTER_EXIT and (self._turned is None or self._turned < self._heard)

    def turned(self, now: float) -> None:
        """A process that was started when the turn was due has ended, or the guest does not answer."""
        self._turned = now

    def check_due(self, now: float, *, started: bool) -> bool:
        """True once for each time that the agent should be asked."""
        limit = self._check_after if started else _CHECK_START
        if self._gone is not None or now - max(self._heard, self._checked) < limit:
            return False
        self._checked = now
        return True

    def over(self, now: float) -> bool:
        """Nothing more is to be expected."""
        quiet = now - self._heard
        if self._gone is not None and now - self._gone >= _LAST_BYTES and quiet >= _LAST_BYTES:
            return True
        if self._exited is None or self._turned is None:
            return False
        if now - self._exited >= _LONGEST_AFTER_EXIT:
            return now - self._turned >= _AFTER_TURN
        return self._turned >= self._heard and now - self._turned >= _AFTER_TURN
