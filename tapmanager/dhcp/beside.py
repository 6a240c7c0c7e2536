"""Work for one guest that the kernel may take its time for, beside the thread that answers all guests."""

from __future__ import annotations

import functools
import logging
import queue
import threading
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
        """`then` is called with what `work` said (False if it failed, or could not be begun) by a later `finish`."""
        once = threading.Lock()
        try:
            self._threads.submit(self._run, once, work, then)
        except RuntimeError as exc:  # no thread can be started now; other guests are answered without
            # It may have been put into the queue all the same, for the next thread that comes.
            if once.acquire(blocking=False):
                log.warning("dhcp.work_not_begun error=%s", exc)
                self._end(then, succeeded=False)

    def finish(self) -> None:
        for _ in range(self._done.qsize()):  # nobody else takes from it; what comes meanwhile wakes again
            self._done.get_nowait()()

    def close(self) -> None:
        """Waits for what runs; what has not begun is left out."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, once: threading.Lock, work: Callable[[], bool], then: Callable[[bool], None]) -> None:
        """`once`: is taken by who does it, or says that it was not done."""
        if not once.acquire(blocking=False):
            return
        succeeded = False
        try:
            succeeded = work()
        except Exception:  # whatever it is, the guest must be told without it
            log.exception("dhcp.work_failed")
        self._end(then, succeeded=succeeded)

    def _end(self, then: Callable[[bool], None], *, succeeded: bool) -> None:
        self._done.put(functools.partial(then, succeeded))
        self._wake()
