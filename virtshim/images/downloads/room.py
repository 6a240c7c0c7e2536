"""Room on the image file system that pulls under way will need, so that two of them are not promised the same."""

from __future__ import annotations

import threading


class Room:
    """Bytes that writers were promised and have not written yet. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promised: dict[object, int] = {}

    def promise(self, writer: object, size: int, free: int) -> bool:
        """Whether `size` further bytes fit into the `free` ones beside what others were promised; if so, they are its own."""
        with self._lock:
            self._promised.pop(writer, None)
            if size > free - sum(self._promised.values()):
                return False
            self._promised[writer] = size
            return True

    def wrote(self, writer: object, size: int) -> None:
        with self._lock:
            left = self._promised.get(writer)
            if left is not None:
                self._promised[writer] = max(0, left - size)

    def release(self, writer: object) -> None:
        with self._lock:
            self._promised.pop(writer, None)
