"""A container's entrypoint in its guest: its output since the last poll, and its exit. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.domain.container import Exit, ExitReason
from virtshim.domain.guest.streaming import Output


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How far one stream has been read. The guest keeps it in numbered pieces; `over`: it is at its end."""

    piece: int = 0
    offset: int = 0
    over: bool = False


@dataclass(frozen=True, slots=True)
class OutputPosition:
    out: StreamPosition = StreamPosition()
    err: StreamPosition = StreamPosition()

    @property
    def over(self) -> bool:
        return self.out.over and self.err.over


@dataclass(frozen=True, slots=True)
class EntrypointProgress:
    """`code`: the command itself has ended with it (128 + n if signal n ended it); others may still hold its streams. `failure`:
    why it could not start. Both are repeated in each answer."""

    output: tuple[Output, ...]
    read_to: OutputPosition
    code: int | None = None
    failure: str = ""

    @property
    def ended(self) -> bool:
        return self.code is not None or bool(self.failure)


def exit_of_entrypoint(progress: EntrypointProgress, at: int) -> Exit:
    """For a command that has ended."""
    if progress.code is None:
        return failed_start(progress.failure, at)
    reason = ExitReason.ERROR if progress.code else ExitReason.COMPLETED
    return Exit(progress.code, reason, at)


def failed_start(why: str, at: int) -> Exit:
    """As containerd reports a command that it could not start."""
    return Exit(128, ExitReason.START_ERROR, at, f"the container's command could not be started: {why}")


def lost(at: int) -> Exit:
    return Exit(
        255,
        ExitReason.ERROR,
        at,
        "the container's command is gone: the guest rebooted, or something in it killed the command",
    )
