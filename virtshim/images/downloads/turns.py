"""Each content is downloaded by one pull at a time; the others wait for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_POLL = 0.2


class Turns:
    """Contents under way, by their source's identity of them. Safe to use from many threads."""

    def __init__(self) -> None:
        self._under_way: set[str] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, identity: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Inside, nobody else has this content's turn. `waiting` is called again and again until it is ours; what it raises
        ends the wait."""
        while not self._take(identity):
            waiting()
        try:
            yield
        finally:
            with self._changed:
                self._under_way.discard(identity)
                self._changed.notify_all()

    def _take(self, identity: str) -> bool:
        """Waits a moment at most."""
        with self._changed:
            if identity in self._under_way:
                self._changed.wait(_POLL)
            if identity in self._under_way:
                return False
            self._under_way.add(identity)
            return True
