"""Room on the image file system that pulls under way will need, so that two of them are not promised the same."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

# Each content is downloaded by one pull at a time; the others wait for it.

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


class Room:
    """What pulls will need: bytes that they have not written yet."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.needed: dict[Share, int] = {}


class Share:
    """One pull's. Safe to use from many threads. Of what its source still sends, packed, and what its writers were promised, the
    larger is what it needs at least: the one becomes the other."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._coming: dict[object, int] = {}
        self._promised: dict[object, int] = {}

    def expect(self, writer: object, size: int, free: int) -> bool:
        """Whether there is room for what `size` bytes of its source will become in this writer's files; if so, it is kept.
        `free`: on the file system."""
        with self._room.lock:
            return self._take(self._coming, writer, size, free)

    def came(self, writer: object, size: int) -> None:
        """So many of them."""
        self._less(self._coming, writer, size)

    def promise(self, writer: object, size: int, free: int) -> bool:
        """Whether `size` further bytes fit; if so, they are the writer's own."""
        with self._room.lock:
            return self._take(self._promised, writer, size, free)

    def wrote(self, writer: object, size: int) -> None:
        self._less(self._promised, writer, size)

    def release(self, writer: object) -> None:
        """It needs nothing any more."""
        with self._room.lock:
            self._coming.pop(writer, None)
            self._promised.pop(writer, None)
            self._note()

    def _take(self, of: dict[object, int], writer: object, size: int, free: int) -> bool:
        of[writer] = size
        others = sum(needed for share, needed in self._room.needed.items() if share is not self)
        if not (fits := not size or self._needed() <= free - others):
            del of[writer]
        self._note()
        return fits

    def _less(self, of: dict[object, int], writer: object, size: int) -> None:
        with self._room.lock:
            if writer in of:
                of[writer] = max(0, of[writer] - size)
                self._note()

    def _needed(self) -> int:
        return max(sum(self._coming.values()), sum(self._promised.values()))

    def _note(self) -> None:
        self._room.needed[self] = self._needed()
        if not self._room.needed[self]:
            del self._room.needed[self]
