"""Reads and watches kubelet's volumes on the node. Implements `virtshim.volumes.ports.KubeletVolumes`."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Collection, Iterator
from typing import Final

import structlog
from inotify_simple import INotify, flags

from virtshim.model.errors import InternalError, InvalidRequest, NotFound, Unavailable, WrongState
from virtshim.model.text import escaped
from virtshim.volumes.copies import (
    DATA,
    MAX_BYTES,
    MAX_DEPTH,
    MAX_ENTRIES,
    CopiedVolume,
    Entry,
    EntryKind,
    is_swapped,
    odd_file,
    too_large,
)
from virtshim.volumes.memory_volumes import Tmpfs
from virtshim.volumes.pod_mounts import subpath_sources

# Watching: inotify tells which of kubelet's volumes have changed. Used by one thread.

log = structlog.get_logger(__name__)

# kubelet moves the new `..data` over the old one, and adds names before or after that.
_CHANGES: Final = flags.MOVED_TO | flags.CREATE | flags.DELETE | flags.ATTRIB | flags.ONLYDIR | flags.DONT_FOLLOW
# For a single file, which kubelet overwrites in place.
_FILE_CHANGES: Final = flags.CLOSE_WRITE | flags.ATTRIB | flags.DELETE_SELF | flags.MOVE_SELF | flags.DONT_FOLLOW
# Milliseconds: events within this time count as one change.
_TOGETHER: Final = 50
# Seconds. A volume that cannot be watched is reported as changed this often.
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
        """Reports volumes that cannot be watched every two seconds."""
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
                if event.mask & flags.IGNORED:  # the watched directory is gone
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
            with contextlib.suppress(OSError):  # the kernel has removed the watch with the directory
                self._inotify.rm_watch(watch)

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            log.warning("volumes.watch.failed", remedy="raise fs.inotify.max_user_watches, if no volume is gone")


# Reading. Follows no link in a volume, and does not wait for a FIFO.
_SAFE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# A volume that kubelet swaps during a read is read again, this many times at most.
_TRIES: Final = 10
_ODD: Final = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class KubeletVolumeFiles(SwapWatch):
    def is_part(self, host_path: str, pod_uid: str) -> bool:
        return any(os.path.isdir(path) for path in subpath_sources(host_path, pod_uid))

    def has_pod(self, log_directory: str) -> bool:
        return log_directory != "" and os.path.isdir(log_directory)

    def read(self, volume: CopiedVolume) -> tuple[Entry, ...]:
        where = escaped(volume.host, 300)
        try:
            for _ in range(_TRIES):
                with contextlib.ExitStack() as opened:
                    place = _opened(volume.host, opened)
                    with contextlib.suppress(_Changed):
                        return _Reader(volume).read(place)
        except FileNotFoundError as exc:
            raise NotFound(f"the volume at {where} does not exist, or not any more") from exc
        except OSError as exc:
            raise InternalError(f"the volume at {where} cannot be read: {exc.strerror}") from exc
        raise Unavailable(f"the volume at {where} keeps changing; it is read again later")

    def empty_tmpfs(self, host_path: str) -> Tmpfs:
        where = escaped(host_path, 300)
        try:
            with contextlib.ExitStack() as opened:
                place = _opened(host_path, opened)
                above = os.open("..", os.O_PATH | _SAFE, dir_fd=place)
                opened.callback(os.close, above)
                mount = _mount_id(place)
                if mount == _mount_id(above) or _kind_of(mount) != "tmpfs":
                    raise InvalidRequest(
                        "the emptyDir does not have medium: Memory; remove the path from the annotation"
                    )
                found, room = os.fstat(place), os.statvfs(f"/proc/self/fd/{place}")
                inside = os.open(".", os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=place)
                opened.callback(os.close, inside)
                with os.scandir(inside) as entries:
                    if any(entries):
                        raise WrongState(
                            f"{where} already has files (from an init container?), which the guest's own tmpfs would hide; "
                            "remove the path from the annotation"
                        )
        except FileNotFoundError as exc:
            raise NotFound(f"the volume at {where} does not exist, or not any more") from exc
        except OSError as exc:
            raise InternalError(f"the volume at {where} cannot be read: {exc.strerror}") from exc
        return Tmpfs(room.f_blocks * room.f_frsize, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)


class _Changed(Exception):
    """The volume changed during the read."""


class _Reader:
    """Reads one volume once."""

    def __init__(self, volume: CopiedVolume) -> None:
        self._volume = volume
        self._entries: list[Entry] = []
        self._bytes = 0

    def read(self, place: int) -> tuple[Entry, ...]:
        """Raises _Changed, ShimError, OSError."""
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            self._add_file(place, "")
            return tuple(self._entries)
        data = _target(place, DATA)
        self._add_directory(place, "", 0, data if is_swapped(data) else "")
        if _target(place, DATA) != data:
            raise _Changed
        return tuple(self._entries)

    def _add_directory(self, place: int, path: str, depth: int, data: str) -> None:
        """`place`: the opened directory. `data`: the directory that `..data` leads to, in a volume that kubelet swaps;
        its other hidden directories are being made or removed."""
        found = os.fstat(place)
        self._add(Entry(path, EntryKind.DIRECTORY, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid))
        if depth > MAX_DEPTH:
            raise too_large(self._volume, f"{MAX_DEPTH} levels")
        inside = os.open(".", os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=place)
        try:
            for name in _names(inside, self._volume):
                if data and name.startswith("..") and name not in (DATA, data):
                    continue
                with _nothing_is_gone(swapped=depth > 0 or bool(data)):
                    self._add_name(inside, name, f"{path}/{name}" if path else name, depth)
        finally:
            os.close(inside)

    def _add_name(self, directory: int, name: str, path: str, depth: int) -> None:
        place = os.open(name, os.O_PATH | _SAFE, dir_fd=directory)
        try:
            found = os.fstat(place)
            if stat.S_ISDIR(found.st_mode):
                self._add_directory(place, path, depth + 1, "")
            elif stat.S_ISLNK(found.st_mode):
                target = os.readlink(name, dir_fd=directory)
                self._add(_entry(path, EntryKind.LINK, found, target=target))
            else:
                self._add_file(place, path)
        finally:
            os.close(place)

    def _add_file(self, place: int, path: str) -> None:
        found = os.fstat(place)
        for is_odd, what in _ODD:
            if is_odd(found.st_mode):
                raise odd_file(self._volume, f"{self._volume.host}/{path}" if path else self._volume.host, what)
        with open(f"/proc/self/fd/{place}", "rb") as file:
            content = file.read(MAX_BYTES - self._bytes + 1)
        self._bytes += len(content)
        if self._bytes > MAX_BYTES:
            raise too_large(self._volume, f"{MAX_BYTES} bytes")
        self._add(_entry(path, EntryKind.FILE, found, content=content))

    def _add(self, entry: Entry) -> None:
        self._entries.append(entry)
        if len(self._entries) > MAX_ENTRIES:
            raise too_large(self._volume, f"{MAX_ENTRIES} files, directories and links")


def _entry(path: str, kind: EntryKind, found: os.stat_result, *, content: bytes = b"", target: str = "") -> Entry:
    mode = stat.S_IMODE(found.st_mode)
    return Entry(path, kind, mode, found.st_uid, found.st_gid, int(found.st_mtime), content, target)


def _names(directory: int, volume: CopiedVolume) -> list[str]:
    names = []
    with os.scandir(directory) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > MAX_ENTRIES:
                raise too_large(volume, f"{MAX_ENTRIES} files, directories and links")
    return sorted(names)


@contextlib.contextmanager
def _nothing_is_gone(*, swapped: bool) -> Iterator[None]:
    """Translates a missing file into _Changed in a volume that kubelet swaps: the file went with the swap."""
    try:
        yield
    except FileNotFoundError as exc:
        if swapped:
            raise _Changed from exc
        raise


def _target(directory: int, name: str) -> str:
    """The target of that link, "" if it is not a link."""
    try:
        return os.readlink(name, dir_fd=directory)
    except FileNotFoundError:
        return ""
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # of what is no link
            raise
        return ""


def _mount_id(place: int) -> str:
    with open(f"/proc/self/fdinfo/{place}", encoding="ascii") as file:
        return next((line.split()[1] for line in file if line.startswith("mnt_id:")), "")


def _kind_of(mount: str) -> str:
    """The type of its file system, from proc(5)'s mountinfo."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.partition(" ")[0] == mount:
                return line.partition(" - ")[2].partition(" ")[0]
    return ""


def _opened(path: str, opened: contextlib.ExitStack) -> int:
    """Opens the path. Links above the pod's directory are followed, because kubelet's own directory may be behind one;
    links below are not."""
    at = max(path.rfind("/pods/"), 0)
    here = os.open(path[:at] or "/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    opened.callback(os.close, here)
    *directories, name = filter(None, path[at:].split("/"))
    for directory in directories:
        here = os.open(directory, os.O_PATH | os.O_DIRECTORY | _SAFE, dir_fd=here)
        opened.callback(os.close, here)
    here = os.open(name, os.O_PATH | _SAFE, dir_fd=here)
    opened.callback(os.close, here)
    return here
