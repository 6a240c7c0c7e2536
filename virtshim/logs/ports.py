"""Console logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from virtshim.guest.command import OutputPosition
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import Output


class Consoles(Protocol):
    """Serial console to CRI log."""

    def open(self, container: ContainerId, log_file: str, log_directory: str = "") -> None:
        """From now on console bytes go to `log_file` in CRI format ("": nowhere); the file (and its directory) exists on
        return, and QEMU's own file is kept in bounds; below `log_directory` ("": its own) no symbolic link is followed.
        Continues where an earlier process stopped. No error if open already."""

    def reopen(self, container: ContainerId) -> None:
        """The log file was renamed: from now on bytes go to a new one of the old name, which exists on return. On error
        none was made, and the old one is written on. WrongState if not open; nothing to do for a log that is discarded."""

    def note(self, container: ContainerId, line: str) -> None:
        """A line of virtshim's own, without its end, on stderr of the log; it is there on return. Nothing to do for a log that is
        discarded. WrongState if not open; after another ShimError nothing of it is there, and it may be tried again."""

    def finish(self, container: ContainerId) -> None:
        """Writes what is left (the VM is off), then stops following, also if writing failed. No error if not open."""


class WatchedConsoles(Consoles, Protocol):
    """With news of what comes on them."""

    def on_news(self, callback: Callable[[ContainerId], None]) -> None:
        """`callback` is called when there may be more on a console, from one thread: it must not wait."""


class BootOutput(Protocol):
    """What consoles show of how far their guests have booted."""

    def shows_kernel(self, container: ContainerId) -> bool:
        """Whether something other than firmware or a boot loader has written on it; True if that cannot be known."""

    def piece(self, container: ContainerId, start: int, most: int) -> bytes:
        """What was written on it from byte `start` on, `most` bytes at most; none if there is nothing. Never raises."""


class EntrypointLogs(Consoles, Protocol):
    """CRI logs of the containers' own commands, both streams in one file."""

    def read_to(self, container: ContainerId) -> OutputPosition:
        """What the last `write`, maybe of an earlier process, was told."""

    def write(self, container: ContainerId, output: Sequence[Output], read_to: OutputPosition) -> int:
        """Both are on disk on return. Gives how many bytes of log that is, or would be if the log were not discarded. After an
        error neither is, and it may be tried again. WrongState if not open."""
