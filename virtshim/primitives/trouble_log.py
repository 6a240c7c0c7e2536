"""Trouble that is met again and again: logged when it begins and when it is over, not each time."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable

import structlog


class TroubleLog:
    """`over`: the event that tells its end. Thread-safe."""

    def __init__(self, log: structlog.stdlib.BoundLogger, over: str) -> None:
        self._log = log
        self._over = over
        self._lock = threading.Lock()
        self._present: dict[Hashable, str] = {}

    def met(self, event: str, key: Hashable = None, **facts: object) -> None:
        """`key` says what is in trouble, where that may be several; a different `event` is different trouble."""
        with self._lock:
            new = self._present.get(key) != event
            self._present[key] = event
        if new:
            self._log.warning(event, **facts)

    def over(self, key: Hashable = None, **facts: object) -> None:
        """Nothing happens if there was none."""
        with self._lock:
            was = self._present.pop(key, None)
        if was is not None:
            self._log.info(self._over, **facts)

    def retain_only(self, keys: Iterable[Hashable]) -> None:
        """Forgets what does not exist any more."""
        with self._lock:
            known = set(keys) if self._present else set()
            self._present = {key: event for key, event in self._present.items() if key in known}
