"""The VMs' cgroups in the kernel: creates them at the requested path, limits them, moves QEMU into them before it starts, and
removes them.

A group's name is computed from the container's id, so its removal can be repeated with only the id. A change of limits is atomic:
if the kernel refuses a value, the earlier values are restored.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Sequence

from tapmanager.cgroups.plan import OWN_PARENT, Hierarchy, RequestedLimits, Setting, parse_mountinfo, settings
from tapmanager.errors import TapmanagerError, internal, invalid, wrong_state
from tapmanager.kernel_files import write_once
from tapmanager.peer import Peer

log = logging.getLogger(__name__)

_MOUNTINFO = "/proc/self/mountinfo"
# Marks groups that were made here. Parents that somebody else made are not removed, even if they are empty.
_OURS = "trusted.virtshim"

# Errors for a wrong value, and for a value that conflicts with the current state.
_INVALID = frozenset({errno.EINVAL, errno.ERANGE, errno.EACCES, errno.EOVERFLOW})
_NOT_NOW = frozenset({errno.EBUSY, errno.ENOSPC})
# Errors that mean that this process may not write to the cgroup file system.
_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

# Seconds: a killed process leaves its cgroup a moment after its parent saw it end.
_EMPTY_WAIT = 3.0
_EMPTY_POLL = 0.01


def hierarchies() -> Sequence[Hierarchy]:
    """The mounted hierarchies. Raises OSError."""
    with open(_MOUNTINFO, encoding="utf-8", errors="surrogateescape") as file:
        found = parse_mountinfo(file.read())
    return [
        Hierarchy(root, _available_controllers(root) if is_v2 else controllers, is_v2)
        for root, controllers, is_v2 in found
    ]


def _available_controllers(root: str) -> frozenset[str]:
    return frozenset(_read(f"{root}/cgroup.controllers").split())


class VmCgroups:
    """Thread-safe. `path`: from `plan.cgroup_path`. Raises TapmanagerError; OSError if the kernel refuses unexpectedly."""

    def __init__(self, found: Sequence[Hierarchy]) -> None:
        self._found = found
        self._lock = threading.Lock()  # for two VMs of one pod, or the removal of an empty parent while a child is made
        self._refused: set[int] = set()

    def make(self, path: str, limits: RequestedLimits) -> bool:
        """Makes the group, if missing, and sets the limits. Returns False if cgroups cannot be written and no pod asked for the
        group; the VM then stays where libvirt starts it."""
        # A pod's cgroup determines the hierarchies. For virtshim's own parent the limits do: beside v1, v2 may have only huge
        # pages.
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
        """Raises TapmanagerError: not-found if the group does not exist, failed-precondition if usage exceeds the new limit."""
        with self._lock:
            places = self._places(path)
            if not places:
                raise TapmanagerError("not-found", f"there is no cgroup {path}")
            self._write_all(path, limits)
            for word in _read(f"{places[0][1]}/cgroup.procs").split():
                self._adjust_oom_score(int(word), oom_score_adj)

    def admit(self, group: str, oom_score_adj: int | None, peer: Peer) -> None:
        """Moves the peer into its VM's group before it becomes QEMU, so that all of its memory is charged to the group. Refuses a
        process that is no longer the peer. `group`: "" leaves the peer where it is. `oom_score_adj`: None leaves it unchanged."""
        _require_live_peer(peer)
        if group:
            self._enter(group, peer.pid)
        if oom_score_adj is not None:
            self._adjust_oom_score(peer.pid, oom_score_adj)

    def remove(self, path: str) -> None:
        """Removes the group. No error if it is gone. Raises TapmanagerError (failed-precondition) if it still has processes."""
        with self._lock:
            for _, directory in self._places(path):
                _remove(directory)
            self._remove_parents(path)

    def forget(self, path: str) -> None:
        """Removes the group of a released sandbox if it is empty. virtshim removes its VMs' groups itself, so an empty one
        belongs to a container whose record was lost. A group with a VM has a record and is left alone. "" means no group."""
        if not path:
            return
        with self._lock:
            for _, directory in self._places(path):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
            self._remove_parents(path)

    def directories(self, path: str) -> Sequence[str]:
        """The group's directories, in each hierarchy that has it."""
        return [directory for _, directory in self._places(path)]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _remove_parents(self, path: str) -> None:
        """Removes empty parents that were made here. A pod's cgroups belong to kubelet."""
        for one in self._found:
            above = os.path.dirname(path)
            with contextlib.suppress(OSError):  # not empty, or already gone
                while above != "/" and (_is_own(path) or os.getxattr(one.root + above, _OURS)):
                    os.rmdir(one.root + above)
                    above = os.path.dirname(above)

    def _enter(self, path: str, pid: int) -> None:
        places = self._places(path)
        if not places:
            raise wrong_state(f"the cgroup {path} is gone; remove the container to recreate it")
        for one, directory in places:
            try:
                write_once(f"{directory}/cgroup.procs", str(pid))
            except OSError as exc:
                raise internal(f"QEMU cannot be moved to {directory}: {exc.strerror}{_why(one, exc)}") from exc

    def _adjust_oom_score(self, pid: int, wanted: int) -> None:
        """Sets oom_score_adj. Lowering it needs CAP_SYS_RESOURCE, which containers and some virtual machines lack; it then stays
        unchanged."""
        path = f"/proc/{pid}/oom_score_adj"
        try:
            write_once(path, str(wanted))
        except PermissionError as exc:
            self._log_once(
                -1, "oom_score_adj.clamped pid=%d wanted=%d stays=%s error=%s", pid, wanted, _read(path), exc
            )
        except (FileNotFoundError, ProcessLookupError):
            return  # the process has ended
        except OSError as exc:
            raise internal(f"oom_score_adj of process {pid} cannot be set to {wanted}: {exc.strerror}") from exc

    def _log_once(self, number: int, message: str, *args: object) -> None:
        """Logs only the first refusal of each kind, because the machine would refuse each VM in the same way."""
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
            with contextlib.suppress(OSError):  # without the mark, the group stays when it is empty
                os.setxattr(here, _OURS, b"1")
        if "cpuset" in one.controllers and not one.is_v2:
            _inherit_cpuset(above, here)
        above = here


def _is_own(path: str) -> bool:
    return os.path.dirname(path) == OWN_PARENT


def _why(one: Hierarchy, exc: OSError) -> str:
    """An explanation for the one refusal that an operator can fix."""
    if one.is_v2 and exc.errno == errno.EBUSY:
        return " (a cgroup v2 with controllers for groups below it cannot hold processes; correct cgroup_parent)"
    return ""


def _require_live_peer(peer: Peer) -> None:
    """Checks that the pid is still the peer's: if a hostile peer has ended, another process may have its pid."""
    try:
        status = _read(f"/proc/{peer.pid}/status")
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise wrong_state(f"process {peer.pid} has ended") from exc
    uids = next(line.split()[1:] for line in status.splitlines() if line.startswith("Uid:"))
    if str(peer.uid) not in uids:
        raise TapmanagerError("permission", f"process {peer.pid} no longer belongs to uid {peer.uid}")


def _enable_controllers(directory: str) -> None:
    """cgroup v2: a controller works in a child only if the parent enables it. Each controller is enabled separately, so that
    a failure (controller missing, processes in the parent) does not affect the others. A limit that needs a missing
    controller is refused later, by name."""
    offered = set(_read(f"{directory}/cgroup.controllers").split())
    on = set(_read(f"{directory}/cgroup.subtree_control").split())
    for controller in sorted(offered - on):
        with contextlib.suppress(OSError):
            write_once(f"{directory}/cgroup.subtree_control", f"+{controller}")


def _inherit_cpuset(above: str, here: str) -> None:
    """cgroup v1: a new cpuset is empty, and accepts no process until it has CPUs and memory nodes."""
    for file in ("cpuset.cpus", "cpuset.mems"):
        if not _read(f"{here}/{file}").strip():
            write_once(f"{here}/{file}", _read(f"{above}/{file}").strip())


def _refuse_less_than_used(directory: str, wanted: int) -> None:
    """Refuses a memory limit below the usage. v1 does that itself, but v2 accepts any limit and kills processes. File pages
    can be dropped, so they do not count."""
    used = int(_read(f"{directory}/memory.current"))
    droppable = dict(line.split() for line in _read(f"{directory}/memory.stat").splitlines())
    used -= int(droppable.get("active_file", 0)) + int(droppable.get("inactive_file", 0))
    if used > wanted:
        raise wrong_state(f"memory: {used} bytes are in use, so the limit cannot be {wanted}")


def _restore(path: str, value: str) -> None:
    try:
        write_once(path, value or "\n")
    except OSError as exc:
        log.warning("cgroup.not_restored path=%s value=%s error=%s", path, value, exc)


def _remove(directory: str) -> None:
    until = time.monotonic() + _EMPTY_WAIT
    while True:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(directory)
        except OSError as exc:
            if exc.errno != errno.EBUSY:
                raise internal(f"the cgroup {directory} cannot be removed: {exc.strerror}") from exc
            if time.monotonic() >= until:
                raise wrong_state(f"the cgroup {directory} cannot be removed: it still contains processes") from exc
        else:
            return
        threading.Event().wait(_EMPTY_POLL)  # the kernel signals this by inotify only in v2


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
