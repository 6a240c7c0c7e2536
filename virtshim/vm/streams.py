"""How far a guest's memory is on its way out of a QEMU or into one, and waiting for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from virtshim.model.errors import DeadlineExceeded, InternalError
from virtshim.system.clock import Clock

# The shortest and the longest pause between two looks, in seconds. Near the end the pause is short, because a guest may stand
# still meanwhile.
_SOON: Final = 0.005
_LATER: Final = 0.1
# Bytes per second. No memory is copied faster, not even empty memory.
_FASTEST: Final = 8 << 30


@dataclass(frozen=True, slots=True)
class StreamState:
    """`stopped`: little of the memory is left, and the guest is paused. `done`: all of the memory is in the pipe, or in QEMU.
    `left`: bytes to send. `failed`: why, "" if it has not failed."""

    stopped: bool = False
    done: bool = False
    left: int = 0
    failed: str = ""


def wait_for_stream(
    look: Callable[[], StreamState],
    clock: Clock,
    seconds: float,
    what: str,
    *,
    stopped: bool = False,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Returns when the stream is done or, with `stopped`, when the guest is paused. `check` is called at each look, and may
    raise. Raises InternalError if the stream has failed, and DeadlineExceeded, which begins with `what`."""
    until = clock.monotonic() + seconds
    while True:
        state = look()
        check()
        if state.failed:
            raise InternalError(state.failed)
        if state.done or (stopped and state.stopped):
            return
        if clock.monotonic() > until:
            raise DeadlineExceeded(f"{what} within {seconds:g} s")
        clock.wait(threading.Event(), min(_LATER, max(_SOON, state.left / _FASTEST)))
