"""vhost-net without the kernel's."""

from __future__ import annotations

import os


class FakeVhostNet:
    """Does what `tapmanager.links.tap.VhostNet` does. `opened`: all descriptors that it gave, in order; they are of nothing."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.wanted = wanted
        self.opened: list[int] = []

    def open(self, count: int) -> list[int]:
        if not self.wanted:
            return []
        fds = [os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC) for _ in range(count)]
        self.opened += fds
        return fds
