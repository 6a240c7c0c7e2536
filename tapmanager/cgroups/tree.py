"""The VMs' cgroups in the kernel: made where virtshim says, limited, entered by QEMU before it starts, removed.

A group's name is computed from the container's id, so its removal can be repeated from the id alone. A change of limits is
all or nothing: what was written is written back if a later value is refused.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence

from tapmanager.cgroups.plan import OWN_PARENT, Hierarchy, RequestedLimits, Setting, parse_mountinfo, settings
from tapmanager.errors import TapmanagerError, internal, invalid
from tapmanager.kernel_files import write_once
from tapmanager.ledger import Placement
from tapmanager.peer import Peer

log = logging.getLogger(__name__)

_MOUNTINFO = "/proc/self/mountinfo"
# On groups that were made here. A parent that somebody else made is his to remove, also while it is empty.
_OURS = "trusted.virtshim"

# The value was wrong; the value does not fit what is there now.
_INVALID = frozenset({errno.EINVAL, errno.ERANGE, errno.EACCES, errno.EOVERFLOW})
_NOT_NOW = frozenset({errno.EBUSY, errno.ENOSPC})
# The file system of cgroups is not ours to write.
_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

# A process that was killed leaves its cgroup a moment after its parent saw it end; seconds.
_EMPTY_WAIT = 3.0
_EMPTY_POLL = 0.01


def hierarchies(mountinfo: str = _MOUNTINFO) -> Sequence[Hierarchy]:
    """What is mounted here. Raises OSError."""
    with open(mountinfo, encoding="utf-8", errors="surrogateescape") as file:
        found = parse_mountinfo(file.read())
    return [
        Hierarchy(root, _available_controllers(root) if is_v2 else controllers, is_v2)
        for root, controllers, is_v2 in found
    ]


def _available_controllers(root: str) -> frozenset[str]:
    return frozenset(_read(f"{root}/cgroup.controllers").split())


class VmCgroups:
    """Thread-safe. `path` is what `plan.cgroup_path` gave. Errors: TapmanagerError; OSError where the kernel refuses what
    it should not."""

    def __init__(self, found: Sequence[Hierarchy]) -> None:
        self._found = found
        self._lock = threading.Lock()  # two VMs of one pod, or removal of an empty parent beside a new child
        self._refused: set[int] = set()

    def make(self, path: str, limits: RequestedLimits) -> bool:
        """The group with these limits; one that is there already is given them. False if cgroups cannot be written here
        and no pod asked for the group: then the VM stays where libvirt starts it."""
        # A pod's own cgroup says where it may have groups; of ours, limits do (cgroup v2 for huge pages alone, beside v1).
        asked = (
            {one.root for one, setting in settings(limits, self._found) if setting.field} if _is_own(path) else set()
        )
        with self._lock:
            try:
                for one in self._found:
                    if one.is_needed or one.root in asked or os.path.isdir(one.root + os.path.dirname(path)):
                        _make_in(one, path)
            except OSError as exc:
                if _is_own(path) and exc.errno in _NOT_WRITABLE:
                    self._log_once(exc.errno, "cgroup.unavailable path=%s error=%s", path, exc)
                    return False
                raise internal(f"the cgroup {path} cannot be made: {exc.strerror} ({exc.filename})") from exc
            if not self._places(path):
                if _is_own(path):
                    return False
                raise invalid(f"the cgroup {path} cannot be made: no cgroups are mounted on this machine")
            self._write_all(path, limits)
        return True

    def limit(self, path: str, limits: RequestedLimits, oom_score_adj: int) -> None:
        """Raises TapmanagerError: not-found if there is no such group, failed-precondition if more is in use than that."""
        with self._lock:
            places = self._places(path)
            if not places:
                raise TapmanagerError("not-found", f"there is no cgroup {path}")
            self._write_all(path, limits)
            for word in _read(f"{places[0][1]}/cgroup.procs").split():
                self._adjust_oom_score(int(word), oom_score_adj)

    def admit(self, placement: Placement, peer: Peer) -> None:
        """Before the peer becomes QEMU: what it allocates from now on is charged to its VM's group. Nothing is done for
        who is no peer's process any more."""
        _require_live_peer(peer)
        if placement.group:
            self._enter(placement.group, peer.pid)
        if placement.oom_score_adj is not None:
            self._adjust_oom_score(peer.pid, placement.oom_score_adj)

    def remove(self, path: str) -> None:
        """No error if it is gone. TapmanagerError (failed-precondition) if processes are in it still."""
        with self._lock:
            for _, directory in self._places(path):
                _remove(directory)
            self._remove_parents(path)

    def forget(self, path: str) -> None:
        """For a sandbox that goes. virtshim removes its VMs' groups; one that is there still, and empty, is of a container
        whose record was lost. One with a VM in it is not touched: it has a record. "" for no group."""
        if not path:
            return
        with self._lock:
            for _, directory in self._places(path):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
            self._remove_parents(path)

    def directories(self, path: str) -> Sequence[str]:
        """Where it is, in each hierarchy that has it."""
        return [directory for _, directory in self._places(path)]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _remove_parents(self, path: str) -> None:
        """Those that were made here; a pod's are kubelet's."""
        for one in self._found:
            above = os.path.dirname(path)
            with contextlib.suppress(OSError):  # others are in it, or it is gone
                while above != "/" and (_is_own(path) or os.getxattr(one.root + above, _OURS)):
                    os.rmdir(one.root + above)
                    above = os.path.dirname(above)

    def _enter(self, path: str, pid: int) -> None:
        places = self._places(path)
        if not places:
            raise TapmanagerError(
                "failed-precondition", f"the cgroup {path} is gone; remove the container to recreate it"
            )
        for one, directory in places:
            try:
                write_once(f"{directory}/cgroup.procs", str(pid))
            except OSError as exc:
                raise internal(f"QEMU cannot be moved to {directory}: {exc.strerror}{_why(one, exc)}") from exc

    def _adjust_oom_score(self, pid: int, wanted: int) -> None:
        """Lowering it needs CAP_SYS_RESOURCE, which containers and some virtual machines lack: then it stays as it is."""
        path = f"/proc/{pid}/oom_score_adj"
        try:
            write_once(path, str(wanted))
        except PermissionError as exc:
            self._log_once(
                -1, "oom_score_adj.clamped pid=%d wanted=%d stays=%s error=%s", pid, wanted, _read(path), exc
            )
        except (FileNotFoundError, ProcessLookupError):
            return  # it has ended
        except OSError as exc:
            raise internal(f"oom_score_adj of process {pid} cannot be set to {wanted}: {exc.strerror}") from exc

    def _log_once(self, number: int, message: str, *args: object) -> None:
        """Logs the first refusal of a kind: it is the machine's, and would come with each VM."""
        if number not in self._refused:
            self._refused.add(number)
            log.warning(message, *args)

    def _places(self, path: str) -> Sequence[tuple[Hierarchy, str]]:
        return [(one, one.root + path) for one in self._found if os.path.isdir(one.root + path)]

    def _write_all(self, path: str, limits: RequestedLimits) -> None:
        planned = settings(limits, self._found)
        with contextlib.ExitStack() as undo:
            for one, setting in planned:
                self._write_one(one.root + path, setting, undo)
            undo.pop_all()

    def _write_one(self, directory: str, setting: Setting, undo: contextlib.ExitStack) -> None:
        path = f"{directory}/{setting.file}"
        if not setting.field and not os.path.exists(path):
            return
        if not setting.file or not os.path.exists(path):
            raise invalid(f"{setting.field}: {directory} has no file for it (cgroup v1, or a controller that is off)")
        if setting.file == "memory.max" and setting.value != "max":
            _refuse_less_than_used(directory, int(setting.value))
        before = _read(path).strip()
        if before == setting.value:
            return
        try:
            write_once(path, setting.value)
        except OSError as exc:
            kind = (
                "failed-precondition" if exc.errno in _NOT_NOW else "invalid" if exc.errno in _INVALID else "internal"
            )
            words = "more than that is in use" if exc.errno == errno.EBUSY else exc.strerror
            raise TapmanagerError(kind, f"{setting.field}: {path} cannot be set to {setting.value}: {words}") from exc
        undo.callback(_restore, path, before)


def _make_in(one: Hierarchy, path: str) -> None:
    above = one.root
    for part in path.strip("/").split("/"):
        if one.is_v2:
            _enable_controllers(above)
        here = f"{above}/{part}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(here, 0o755)
            with contextlib.suppress(OSError):  # then it stays when it is empty
                os.setxattr(here, _OURS, b"1")
        if "cpuset" in one.controllers and not one.is_v2:
            _inherit_cpuset(above, here)
        above = here


def _is_own(path: str) -> bool:
    return os.path.dirname(path) == OWN_PARENT


def _why(one: Hierarchy, exc: OSError) -> str:
    """The one refusal that an operator can act on."""
    if one.is_v2 and exc.errno == errno.EBUSY:
        return " (a cgroup v2 with controllers for groups below it cannot hold processes; correct cgroup_parent)"
    return ""


def _require_live_peer(peer: Peer) -> None:
    """The peer's number may belong to another process by now, if the peer is hostile and has ended."""
    try:
        status = _read(f"/proc/{peer.pid}/status")
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise TapmanagerError("failed-precondition", f"process {peer.pid} has ended") from exc
    uids = next(line.split()[1:] for line in status.splitlines() if line.startswith("Uid:"))
    if str(peer.uid) not in uids:
        raise TapmanagerError("permission", f"process {peer.pid} is not uid {peer.uid}'s any more")


def _enable_controllers(directory: str) -> None:
    """cgroup v2: a controller works in a child only if the parent says so. Each by itself: one that cannot be had (no
    such controller, processes in the way) must not keep the others from being had; a limit that needs it is refused
    later, by name."""
    offered = set(_read(f"{directory}/cgroup.controllers").split())
    on = set(_read(f"{directory}/cgroup.subtree_control").split())
    for controller in sorted(offered - on):
        with contextlib.suppress(OSError):
            write_once(f"{directory}/cgroup.subtree_control", f"+{controller}")


def _inherit_cpuset(above: str, here: str) -> None:
    """cgroup v1: a new cpuset is empty, and takes no process until it has CPUs and memory nodes."""
    for file in ("cpuset.cpus", "cpuset.mems"):
        if not _read(f"{here}/{file}").strip():
            write_once(f"{here}/{file}", _read(f"{above}/{file}").strip())


def _refuse_less_than_used(directory: str, wanted: int) -> None:
    """cgroup v2 takes any limit and kills what it must; v1 refuses by itself. File pages can be dropped, so they do not
    count."""
    used = int(_read(f"{directory}/memory.current"))
    droppable = dict(line.split() for line in _read(f"{directory}/memory.stat").splitlines())
    used -= int(droppable.get("active_file", 0)) + int(droppable.get("inactive_file", 0))
    if used > wanted:
        raise TapmanagerError("failed-precondition", f"memory: {used} bytes are in use, the limit cannot be {wanted}")


def _restore(path: str, value: str) -> None:
    try:
        write_once(path, value or "\n")
    except OSError as exc:
        log.warning("cgroup.not_restored path=%s value=%s error=%s", path, value, exc)


def _remove(directory: str) -> None:
    until = time.monotonic() + _EMPTY_WAIT
    for _ in _until(until):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            return
        except OSError as exc:
            if exc.errno != errno.EBUSY:
                raise internal(f"the cgroup {directory} cannot be removed: {exc.strerror}") from exc
        else:
            return
    raise TapmanagerError(
        "failed-precondition", f"the cgroup {directory} cannot be removed: it still contains processes"
    )


def _until(end: float) -> Iterator[None]:
    yield
    while time.monotonic() < end:
        threading.Event().wait(_EMPTY_POLL)  # the kernel signals it by inotify, in v2 only
        yield


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
