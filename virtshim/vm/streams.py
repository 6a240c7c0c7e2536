"""How far a guest's memory is on its way out of a QEMU or into one, and waiting for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from virtshim.model.errors import DeadlineExceeded, InternalError
from virtshim.system.clock import Clock

# Seconds between two looks: near the end, when a guest may stand still meanwhile, and before.
_SOON: Final = 0.005
_LATER: Final = 0.1
# Bytes that are left near the end.
_LITTLE: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class StreamState:
    """`stopped`: little of the memory is left, and the guest stands still. `done`: all of the memory is in the pipe, or in QEMU.
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
    """Returns when the stream is done or, with `stopped`, when the guest stands still. `check` is called at each look, and may
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
        clock.wait(threading.Event(), _LATER if state.left > _LITTLE else _SOON)
