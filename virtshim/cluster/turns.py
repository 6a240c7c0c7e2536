"""Whose turn it is: VMs about which something is new, each given to one worker at a time, and alarms for those that only wait."""

from __future__ import annotations

import heapq
import threading
from typing import Final

from virtshim.system.clock import Clock

Key = tuple[str, str]
_LONGEST_WAIT: Final = 30.0


class Turns:
    """Thread-safe. A VM that is touched while a worker has it comes again afterwards."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._due: dict[Key, None] = {}
        self._taken: set[Key] = set()
        self._alarms: list[tuple[float, Key]] = []
        self._news = threading.Event()
        self._is_over = False

    def touch(self, key: Key) -> None:
        with self._lock:
            self._due[key] = None
            self._news.set()

    def touch_at(self, key: Key, at: float) -> None:
        """`at`: seconds since the epoch."""
        with self._lock:
            heapq.heappush(self._alarms, (at, key))
            self._news.set()

    def take(self) -> Key | None:
        """Waits for a VM; `done` gives it back. None after `close`."""
        while True:
            with self._lock:
                if self._is_over:
                    return None
                now = self._clock.now_ns() / 1e9
                while self._alarms and self._alarms[0][0] <= now:
                    self._due[heapq.heappop(self._alarms)[1]] = None
                found = next((one for one in self._due if one not in self._taken), None)
                if found is not None:
                    del self._due[found]
                    self._taken.add(found)
                    return found
                self._news.clear()
                wait = min(_LONGEST_WAIT, self._alarms[0][0] - now) if self._alarms else _LONGEST_WAIT
            self._clock.wait(self._news, wait)

    def done(self, key: Key) -> None:
        with self._lock:
            self._taken.discard(key)
            self._news.set()

    def close(self) -> None:
        with self._lock:
            self._is_over = True
            self._news.set()
