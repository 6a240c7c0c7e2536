"""Queues VMs about which something is new, and gives each to one worker at a time. Has alarms for VMs that only wait."""

from __future__ import annotations

import threading
from typing import Final

from virtshim.system.clock import Clock

# Namespace and name of a VM.
Key = tuple[str, str]
_LONGEST_WAIT: Final = 30.0


class Turns:
    """Thread-safe. A VM that is touched while a worker has it comes again afterwards."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._due: dict[Key, None] = {}
        self._taken: set[Key] = set()
        self._alarms: dict[Key, float] = {}
        self._news = threading.Event()
        self._is_over = False

    def touch(self, key: Key) -> None:
        with self._lock:
            self._due[key] = None
            self._news.set()

    def touch_at(self, key: Key, at: float) -> None:
        """`at`: seconds since the epoch. The earliest alarm of a VM counts, because its turn sets the next one."""
        with self._lock:
            self._alarms[key] = min(at, self._alarms.get(key, at))
            self._news.set()

    def take(self) -> Key | None:
        """Waits for a VM; `done` gives it back. None after `close`."""
        while True:
            with self._lock:
                if self._is_over:
                    return None
                now = self._clock.now_ns() / 1e9
                for key in [key for key, at in self._alarms.items() if at <= now]:
                    del self._alarms[key]
                    self._due[key] = None
                found = next((one for one in self._due if one not in self._taken), None)
                if found is not None:
                    del self._due[found]
                    self._taken.add(found)
                    return found
                self._news.clear()
                wait = min([_LONGEST_WAIT, *(at - now for at in self._alarms.values())])
            self._clock.wait(self._news, wait)

    def done(self, key: Key) -> None:
        with self._lock:
            self._taken.discard(key)
            self._news.set()

    def close(self) -> None:
        with self._lock:
            self._is_over = True
            self._news.set()
