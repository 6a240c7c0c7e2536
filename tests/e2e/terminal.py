"""Runs a program on a terminal, and types there as a person does."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

LIMIT = 60.0


class Terminal:
    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.seen = b""
        self._descriptor = descriptor

    def sees(self, text: bytes, seconds: float = LIMIT) -> bool:
        """Whether the text is on the screen, or appears within that time."""
        until = time.monotonic() + seconds
        while text not in self.seen:
            if not select.select([self._descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
                return False
            self.seen += os.read(self._descriptor, 4096)
        return True

    def press(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def is_answered_by_a_shell(self) -> bool:
        for _ in range(30):  # a starting shell discards input before its prompt
            self.press(b"echo typ''ed\r")
            if self.sees(b"typed", 2):
                return True
        return False


@contextlib.contextmanager
def terminal(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[Terminal]:
    """Runs the program on a terminal, and kills it at the end."""
    ours, its = pty.openpty()
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(its)
