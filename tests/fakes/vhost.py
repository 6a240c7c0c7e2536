"""vhost-net without a kernel."""

from __future__ import annotations

import os


class FakeVhostNet:
    """Replaces `tapmanager.links.tap.VhostNet`. `opened`: all descriptors that it returned, in order; nothing is behind
    them."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.wanted = wanted
        self.opened: list[int] = []

    def open(self, count: int) -> list[int]:
        if not self.wanted:
            return []
        fds = [os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC) for _ in range(count)]
        self.opened += fds
        return fds
