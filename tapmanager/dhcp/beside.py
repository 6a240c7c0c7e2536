"""Work for one guest that the kernel may take its time for, beside the thread that answers all guests."""

from __future__ import annotations

import functools
import logging
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)

# Each piece is some netlink messages; where one hangs, those of other guests have the other threads.
_AT_ONCE = 4


class Beside:
    """`begin` and `finish` are called by the answering thread alone; `wake`, by any, when there is something to finish."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._threads = ThreadPoolExecutor(_AT_ONCE, "beside-dhcp")
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def begin(self, work: Callable[[], bool], then: Callable[[bool], None]) -> None:
        """`then` is called with what `work` said (False if it failed) by a later `finish`."""
        self._threads.submit(self._run, work, then)

    def finish(self) -> None:
        while not self._done.empty():  # nobody else takes from it
            self._done.get_nowait()()

    def close(self) -> None:
        """Waits for what runs; what has not begun is left out."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, work: Callable[[], bool], then: Callable[[bool], None]) -> None:
        succeeded = False
        try:
            succeeded = work()
        except Exception:  # whatever it is, the guest must be told without it
            log.exception("dhcp.work_failed")
        self._done.put(functools.partial(then, succeeded))
        self._wake()
