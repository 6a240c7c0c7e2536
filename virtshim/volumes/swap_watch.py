"""Which of kubelet's volumes have changed, as the kernel tells it (inotify). Used by one thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection
from typing import Final

import structlog
from inotify_simple import INotify, flags

log = structlog.get_logger(__name__)

# kubelet moves the new `..data` over the old one, and makes names before or after that.
_CHANGES: Final = flags.MOVED_TO | flags.CREATE | flags.DELETE | flags.ATTRIB | flags.ONLYDIR | flags.DONT_FOLLOW
# Of a file, which kubelet writes in its place.
_FILE_CHANGES: Final = flags.CLOSE_WRITE | flags.ATTRIB | flags.DELETE_SELF | flags.MOVE_SELF | flags.DONT_FOLLOW
# Milliseconds: what comes in so short a time is one change.
_TOGETHER: Final = 50
# Seconds between two looks at volumes that cannot be watched; each is reported then.
_LOOK: Final = 2.0


class SwapWatch:
    def __init__(self) -> None:
        self._inotify: INotify | None = None
        try:
            self._inotify = INotify(nonblocking=True)
        except OSError as error:
            log.warning("volumes.watch.unavailable", error=str(error), remedy="raise fs.inotify.max_user_instances")
        self._watches: dict[str, int] = {}
        self._asked: frozenset[str] = frozenset()
        self._told = False

    def close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def changed(self, hosts: Collection[str], timeout: float) -> Collection[str]:
        """See the port. What cannot be watched is reported every two seconds."""
        wanted = frozenset(hosts)
        for gone in [host for host in self._watches if host not in wanted]:
            self._drop(gone)
        unwatched = {host for host in wanted if host not in self._watches and not self._add(host)}
        new, self._asked = wanted - self._asked, wanted
        if new or not wanted:
            return new
        if unwatched:
            self._tell()
            timeout = min(timeout, _LOOK)
        return self._events(timeout) | unwatched

    def _events(self, timeout: float) -> set[str]:
        if self._inotify is None:
            threading.Event().wait(timeout)
            return set()
        by_watch = {watch: host for host, watch in self._watches.items()}
        found = set()
        for event in self._inotify.read(timeout=int(timeout * 1000), read_delay=_TOGETHER):
            if event.mask & flags.Q_OVERFLOW:
                return set(self._watches)
            if host := by_watch.get(event.wd):
                found.add(host)
                if event.mask & flags.IGNORED:  # it is gone
                    self._watches.pop(host, None)
        return found

    def _add(self, host: str) -> bool:
        if self._inotify is None:
            return False
        for changes in (_CHANGES, _FILE_CHANGES):
            with contextlib.suppress(OSError):
                self._watches[host] = self._inotify.add_watch(host, changes)
                return True
        return False

    def _drop(self, host: str) -> None:
        watch = self._watches.pop(host)
        if self._inotify is not None:
            with contextlib.suppress(OSError):  # the kernel removed it with the directory
                self._inotify.rm_watch(watch)

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            log.warning("volumes.watch.failed", remedy="raise fs.inotify.max_user_watches, if no volume is gone")
