"""The directories that lead to what is written next: they stay open, so that neighbours cost no walk from the top."""

from __future__ import annotations

import os
from dataclasses import dataclass

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Directories that may be opened for all entries, and for each. Archives list what is in a directory together.
_ONCE, _EACH = 50_000, 16


class TooManySteps(Exception):
    """Its entries are in an order that is made to keep a processor busy."""


@dataclass(slots=True)
class _Open:
    name: str
    descriptor: int
    mtime_ns: int


class Directories:
    """Below one directory, over no link."""

    def __init__(self, base: int, *, keeps_times: bool) -> None:
        """`base` stays its owner's. `keeps_times`: a directory that is left is as old as it was when it was entered, whatever was
        made in it."""
        self._base = base
        self._keeps_times = keeps_times
        self._open: list[_Open] = []
        self._steps = _ONCE

    def enter(self, names: tuple[str, ...]) -> int:
        """Its descriptor, ours to close. Raises OSError, TooManySteps."""
        self._steps += _EACH
        same = 0
        while same < min(len(names), len(self._open)) and names[same] == self._open[same].name:
            same += 1
        self.leave(same)
        for name in names[same:]:
            self._steps -= 1
            if self._steps < 0:
                raise TooManySteps
            descriptor = os.open(name, _DIRECTORY, dir_fd=self._last)
            self._open.append(_Open(name, descriptor, os.fstat(descriptor).st_mtime_ns))
        return self._last

    def leave(self, depth: int = 0) -> None:
        """All that are deeper. Raises OSError."""
        while len(self._open) > depth:
            left = self._open.pop()
            os.close(left.descriptor)
            if self._keeps_times:
                times = (left.mtime_ns, left.mtime_ns)
                os.utime(left.name, ns=times, dir_fd=self._last, follow_symlinks=False)

    def close(self) -> None:
        """Nothing is made any more."""
        self._keeps_times = False
        self.leave()

    @property
    def _last(self) -> int:
        return self._open[-1].descriptor if self._open else self._base
