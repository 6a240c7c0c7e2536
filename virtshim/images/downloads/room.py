"""Space on the image file system that running pulls will need, so that it is not promised twice. Also their turns: each content
is downloaded by one pull at a time, and the others wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_POLL = 0.2


class Turns:
    """The identities of contents that are being downloaded. Thread-safe."""

    def __init__(self) -> None:
        self._under_way: set[str] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, identity: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Inside the block no other pull has this content's turn. While it waits for the turn, calls `waiting` repeatedly; an
        exception from `waiting` ends the wait."""
        while not self._take(identity):
            waiting()
        try:
            yield
        finally:
            with self._changed:
                self._under_way.discard(identity)
                self._changed.notify_all()

    def _take(self, identity: str) -> bool:
        """Tries to take the turn. Waits for a moment at most."""
        with self._changed:
            if identity in self._under_way:
                self._changed.wait(_POLL)
            if identity in self._under_way:
                return False
            self._under_way.add(identity)
            return True


class Room:
    """The bytes that pulls will need but have not written yet."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.needed: dict[Share, int] = {}


class Share:
    """The space that one pull needs: the larger of the packed bytes that its source will still send, and the bytes promised to
    its writers. They are not added, because the packed bytes become the written bytes. Thread-safe."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._coming: dict[object, int] = {}
        self._promised: dict[object, int] = {}

    def expect(self, writer: object, size: int, free: int) -> bool:
        """Reserves space for the files that will be made from `size` bytes of the source. Returns whether they fit. `free`: bytes
        free on the file system."""
        with self._room.lock:
            return self._take(self._coming, writer, size, free)

    def came(self, writer: object, size: int) -> None:
        """`size` of the expected bytes arrived."""
        self._less(self._coming, writer, size)

    def promise(self, writer: object, size: int, free: int) -> bool:
        """Reserves space for `size` more bytes of the writer. Returns whether they fit."""
        with self._room.lock:
            return self._take(self._promised, writer, size, free)

    def wrote(self, writer: object, size: int) -> None:
        self._less(self._promised, writer, size)

    def release(self, writer: object) -> None:
        """Gives back all of the writer's reserved space."""
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
