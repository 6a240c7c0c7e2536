"""Listens to the consoles of a VM that moves from node to node."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

# The guest says something all the time.
TALK = "(while :; do echo . > /dev/console; usleep 2000; done) </dev/null >/dev/null 2>&1 &"

_TICK = 0.0005


class Ears:
    """`consoles`: the raw logs, on the first node and on the second."""

    def __init__(self, consoles: Sequence[Path]) -> None:
        self._consoles = consoles
        self._last_of_first = 0.0
        self._first_of_second = 0.0
        self._heard = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def wait_for_second(self, seconds: float) -> None:
        assert self._heard.wait(seconds), "the guest says nothing on its new node"

    def gap_ms(self) -> float:
        """Milliseconds between the last word on the first node and the first word on the second; negative if there were two
        guests."""
        return (self._first_of_second - self._last_of_first) * 1000

    def _listen(self) -> None:
        before = 0
        while not self._over.is_set():
            sizes = [path.stat().st_size if path.exists() else 0 for path in self._consoles]
            now = time.monotonic()
            if sizes[0] != before:
                before, self._last_of_first = sizes[0], now
            if sizes[1] and not self._heard.is_set():
                self._first_of_second = now
                self._heard.set()
            time.sleep(_TICK)


def console(directory: str, container: str) -> Path:
    """`directory`: the node's."""
    return Path(f"{directory}/state/containers/{container}/console.log")
