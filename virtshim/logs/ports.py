"""Ports of the logs of consoles and of containers' commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from virtshim.guest.command import OutputPosition
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import Output


class Consoles(Protocol):
    """Copies serial consoles to CRI logs."""

    def open(self, container: ContainerId, log_file: str, log_directory: str = "") -> None:
        """Starts copying the console to `log_file` in CRI format; "" discards the output. On return the file and its
        directory exist, and QEMU's own file stays within its limit. No symbolic link is followed below `log_directory`
        ("": the file's own directory). Continues where an earlier process stopped. No error if the log is open
        already."""

    def reopen(self, container: ContainerId) -> None:
        """Call this after the log file was renamed. Output then goes to a new file of the old name, which exists on
        return. After an error there is no new file, and output goes to the renamed one. Raises WrongState if the log is
        not open. Does nothing for a log that is discarded."""

    def note(self, container: ContainerId, line: str) -> None:
        """Writes a line of virtshim's own to the log's stderr; it is in the log on return. `line`: without the line
        end. Does nothing for a log that is discarded. Raises WrongState if the log is not open. After another
        ShimError, the log has nothing of the line, and the call may be repeated."""

    def finish(self, container: ContainerId) -> None:
        """Writes the remaining output of a VM that is off, then stops following the console, even if writing failed. No
        error if the log is not open."""


class WatchedConsoles(Consoles, Protocol):
    """Consoles that report new output."""

    def on_news(self, callback: Callable[[ContainerId], None]) -> None:
        """Calls `callback` when a console may have new output. All calls come from one thread, so `callback` must not
        wait."""


class BootOutput(Protocol):
    """Consoles' output during the boot of their guests."""

    def shows_kernel(self, container: ContainerId) -> bool:
        """Whether something other than firmware or a boot loader has written to the console. True if that cannot be
        determined."""

    def piece(self, container: ContainerId, start: int, most: int) -> bytes:
        """At most `most` bytes of the console's output from byte `start` on; b"" if there are none. Never raises."""


class EntrypointLogs(Consoles, Protocol):
    """CRI logs of the containers' own commands. Both streams are in one file."""

    def read_to(self, container: ContainerId) -> OutputPosition:
        """The `read_to` of the last `write`, which an earlier process may have made."""

    def write(self, container: ContainerId, output: Sequence[Output], read_to: OutputPosition) -> int:
        """Writes output and position, which are both on disk on return. Returns the number of bytes that the output
        takes in the log, even if the log is discarded. After an error neither is written, and the call may be repeated.
        Raises WrongState if the log is not open."""
