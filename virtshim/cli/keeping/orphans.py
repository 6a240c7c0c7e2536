"""Takes in the QEMUs whose parent has ended, as init would. Must not take the ends of this process's own children.

libvirt forks twice for a QEMU, so its parent is the nearest process above that asked for orphans. libvirt waits until
that parent has reaped QEMU, and the init of a container may do so only every few seconds.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h


class _Child(Protocol):
    """What is needed of a `subprocess.Popen`, which several threads may wait for."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int: ...


C = TypeVar("C", bound=_Child)


class Orphans:
    """`start_child` for each child of one's own; `adopt` once, for those of others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: dict[int, _Child] = {}
        self._child_started = threading.Event()

    def start_child(self, start: Callable[[], C]) -> C:
        """Its end is left to whoever asks the child for it, however soon it comes."""
        with self._lock:
            child = start()
            self._own[child.pid] = child
            self._child_started.set()
            return child

    def adopt(self) -> None:
        """From now on orphans below this process are its children, and are reaped at once."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        threading.Thread(target=self._reap, name="orphans", daemon=True).start()

    def _reap(self) -> None:
        while True:
            try:
                # Only looks: whose the child is has to be known first.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:  # no child, so no orphan either until there is one
                self._child_started.wait()
                self._child_started.clear()
                continue
            if ended is None:
                continue
            with self._lock:
                child = self._own.pop(ended.si_pid, None)
            if child is not None:
                child.wait()  # keeps the result for whoever asks
            else:
                os.waitid(os.P_PID, ended.si_pid, os.WEXITED)
