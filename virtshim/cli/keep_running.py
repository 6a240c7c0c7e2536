"""Keeps a node's daemons running. A daemon that dies is restarted, after a growing delay if it dies soon. A daemon that
never becomes ready is given up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.cli.daemons import Daemon, last_words
from virtshim.model.errors import Unavailable
from virtshim.system.clock import Clock

_POLL: Final = 0.2
# Seconds until the next start: doubled after each short life, up to _LONGEST. A life of _WELL seconds is not short.
_FIRST: Final = 0.5
_LONGEST: Final = 30.0
_WELL: Final = 60.0
# How many starts in a row may fail.
_TRIES: Final = 6


@dataclass(slots=True)
class Kept:
    """One daemon. `begins`: when to start it next; None while it runs. `at`: when it came up, or when its start began."""

    daemon: Daemon
    tell: Callable[[str], None]
    begins: float | None = None
    at: float = 0.0
    is_up: bool = True
    short: int = 0
    """Number of short lives in a row."""
    failed: int = 0
    """Number of failed starts in a row."""

    def look(self, now: float) -> None:
        """Raises Unavailable if the daemon keeps failing to start."""
        if self.begins is not None:
            if now >= self.begins:
                self.begins, self.is_up, self.at = None, False, now
                self.daemon.launch()
        elif not self.is_up:
            self._await(now)
        elif not self.daemon.is_running:
            if now - self.at >= _WELL:
                self.short = 0
            self._again(now, self.short, f"{self.daemon.name} {_how(self.daemon.code)}")
            self.short += 1

    def _await(self, now: float) -> None:
        try:
            self.is_up = self.daemon.is_ready()
        except Unavailable as exc:
            self.failed += 1
            if self.failed >= _TRIES:
                raise Unavailable(
                    f"{exc}, {_TRIES} times in a row; giving up. The VMs keep running. Correct the fault, and run `virtshim up` "
                    f"again{last_words(self.daemon)}"
                ) from exc
            self._again(now, self.failed, str(exc))
            return
        if self.is_up:
            self.failed, self.at = 0, now
            self.tell(f"{self.daemon.name} runs again")

    def _again(self, now: float, times: int, why: str) -> None:
        """Schedules the next start. `times`: how many short lives or failed starts came before."""
        delay = min(_LONGEST, _FIRST * 2 ** (times - 1)) if times else 0.0
        self.begins = now + delay
        self.tell(f"{why}; starting it again" + (f" in {delay:g} s" if delay else ""))


def keep(daemons: Sequence[Daemon], stopping: threading.Event, clock: Clock, tell: Callable[[str], None]) -> None:
    """Runs until `stopping` is set. Raises Unavailable if a daemon fails to start too many times in a row."""
    kept = [Kept(daemon, tell, at=clock.monotonic()) for daemon in daemons]
    while not clock.wait(stopping, _POLL):
        for one in kept:
            one.look(clock.monotonic())


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with code {code}"
    return f"was killed by {signal.Signals(-code).name}"
