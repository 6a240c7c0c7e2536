"""Reports which raw logs have grown, by the kernel's inotify. Used by one thread.

The kernel watches the log itself and not its directory, because QEMU also writes the disk in that directory. The
directory is watched, for new names, only while the log does not exist: at first, and after a rename.
"""

from __future__ import annotations

import contextlib
import os

import structlog
from inotify_simple import INotify, flags

from virtshim.model.ids import ContainerId

log = structlog.get_logger(__name__)

_GROWN = flags.MODIFY | flags.MOVE_SELF | flags.DONT_FOLLOW
_APPEARED = flags.CREATE | flags.MOVED_TO | flags.ONLYDIR | flags.DONT_FOLLOW


class RawLogWatch:
    """Without inotify (this node has no instance left) this reports nothing, and the caller has to check the logs
    itself."""

    def __init__(self) -> None:
        self._inotify: INotify | None = None
        try:
            self._inotify = INotify(nonblocking=True)
        except OSError as error:
            log.warning("console.watch.unavailable", error=str(error), remedy="raise fs.inotify.max_user_instances")
        self._containers: dict[int, ContainerId] = {}
        self._files: dict[ContainerId, int] = {}
        self._directories: dict[ContainerId, int] = {}
        self._unwatched: set[ContainerId] = set()

    @property
    def descriptor(self) -> int | None:
        """The descriptor to poll for input; None without inotify."""
        return None if self._inotify is None else int(self._inotify.fileno())

    @property
    def has_unwatched(self) -> bool:
        """Whether some console cannot be watched."""
        return bool(self._unwatched)

    def ensure_watched(self, container: ContainerId, raw_path: str) -> None:
        """Call this before each reading of the log. Output that is written after this call is reported, or
        `has_unwatched` is true."""
        if container in self._files:
            return
        watched = self._watch_file(container, raw_path)
        if not watched and container not in self._directories:
            watched = self._add(container, os.path.dirname(raw_path), _APPEARED, self._directories)
            # The file may have appeared before the directory was watched.
            watched = self._watch_file(container, raw_path) or watched
        if watched or container in self._directories:
            self._unwatched.discard(container)
            return
        if not self._unwatched:
            log.warning("console.watch.failed", container=container.short, remedy="raise fs.inotify.max_user_watches")
        self._unwatched.add(container)

    def _watch_file(self, container: ContainerId, raw_path: str) -> bool:
        if not self._add(container, raw_path, _GROWN, self._files):
            return False
        self._remove(self._directories.pop(container, None))
        return True

    def _add(self, container: ContainerId, path: str, mask: int, kind: dict[ContainerId, int]) -> bool:
        if self._inotify is None:
            return False
        try:
            watch = self._inotify.add_watch(path, mask)
        except OSError:
            return False
        kind[container] = watch
        self._containers[watch] = container
        return True

    def _remove(self, watch: int | None) -> None:
        if watch is None or self._containers.pop(watch, None) is None or self._inotify is None:
            return
        with contextlib.suppress(OSError):  # the kernel removed it with its file
            self._inotify.rm_watch(watch)

    def drop(self, container: ContainerId) -> None:
        self._remove(self._files.pop(container, None))
        self._remove(self._directories.pop(container, None))
        self._unwatched.discard(container)

    def reported(self) -> set[ContainerId] | None:
        """The consoles whose logs have changed; None if events were lost, so that all consoles must be checked."""
        touched: set[ContainerId] = set()
        lost = False
        for event in self._inotify.read(timeout=0) if self._inotify is not None else ():
            lost = lost or bool(event.mask & flags.Q_OVERFLOW)
            container = self._containers.get(event.wd)
            if container is None:
                continue
            touched.add(container)
            if event.mask & flags.IGNORED:
                self._forget(container, event.wd)
            elif event.mask & flags.MOVE_SELF:  # it was full: its name is another file's now
                self._remove(self._files.pop(container, None))
        return None if lost else touched

    def _forget(self, container: ContainerId, watch: int) -> None:
        """Forgets a watch that the kernel has removed."""
        del self._containers[watch]
        for kind in (self._files, self._directories):
            if kind.get(container) == watch:
                del kind[container]

    def close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
