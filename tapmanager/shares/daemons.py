"""The share daemons of the VMs: started by way of `launcher`, found by their command lines, ended.

Nothing is remembered: which there are is read from the directory of shares, and which processes serve one from /proc. So a kill
of this program at any step leaves what the next call finds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tapmanager.cgroups.plan import RequestedLimits
from tapmanager.cgroups.tree import VmCgroups
from tapmanager.errors import TapmanagerError, deadline, internal, unavailable
from tapmanager.kernel_files import names_in
from tapmanager.keyed_locks import KeyedLocks
from tapmanager.shares import launcher, plan
from tapmanager.shares.plan import SharedMount

log = logging.getLogger(__name__)

_LONGEST_ANSWER = 65536
_FILE_MAX = "/proc/sys/fs/file-max"
# Of a process, a cgroup or a file; the last two where the kernel hides a process that is another user's.
_GONE = (errno.ENOENT, errno.ESRCH, errno.ENODEV, errno.EACCES, errno.EPERM)
_VERSION_SECONDS = 10.0
# Of the asker's time: who waits until its end has stopped listening when it is told which volume does not answer.
_TO_TELL = 0.1
# A process that was killed is gone a moment later, unless the kernel waits for a volume's server; seconds.
_END_WAIT, _END_POLL = 10.0, 0.005


@dataclass(frozen=True, slots=True)
class Place:
    """Where a share is: a directory of its own."""

    directory: str

    @property
    def root(self) -> str:
        return f"{self.directory}/{plan.ROOT}"

    @property
    def socket(self) -> str:
        return f"{self.directory}/{plan.SOCKET}"

    @property
    def group_file(self) -> str:
        return f"{self.directory}/{plan.GROUP}"


class ShareDaemons:
    """Thread-safe; one VM's never waits for another's. `until` is a point of time.monotonic()."""

    def __init__(self, groups: VmCgroups, program: str = "", open_files: int = 0) -> None:
        """`open_files`: how many each daemon may have open; 0: a part of the node's."""
        self._groups = groups
        self._program = program
        self._open_files = open_files
        self._locks = KeyedLocks()
        self._children = _Children()

    def use_program(self, program: str) -> None:
        """For the VMs that come; "" looks for one. Those that run keep theirs."""
        self._program = program

    def check(self, mounts: Sequence[SharedMount], until: float) -> None:
        """Raises TapmanagerError for the first that cannot be shared, and if there is no virtiofsd here."""
        self._find_program()
        self._launch("check", "/", mounts, {}, until - _TO_TELL * max(0.0, until - time.monotonic()))

    def start(self, place: Place, uid: int, mounts: Sequence[SharedMount], until: float, group: str = "") -> None:
        """When it returns, QEMU may call: only `uid` can. What was there of it before is ended. `group`: the path of a cgroup of
        its own; "" for ours."""
        with self._locks.holding(place.directory, until):
            program, rust = self._find_program()
            self._end(place, until)
            try:
                listener = self._prepare(place, uid, group)
                with listener:
                    orders = {
                        "command": list(plan.command_line(program, listener.fileno(), place.root, rust=rust)),
                        "groups": self._enter(group),
                        "open_files": self._open_files or plan.most_open_files(int(_text(_FILE_MAX))),
                    }
                    self._launch("serve", place.root, mounts, orders, until, keep=listener.fileno())
            except BaseException:
                with contextlib.suppress(TapmanagerError, OSError):
                    self._end(place, time.monotonic() + _END_WAIT)
                raise
        log.info("share.started directory=%s volumes=%d", place.directory, len(mounts))

    def end(self, place: Place, until: float) -> None:
        """No error if there is none. Afterwards no process holds a volume, and nothing of it is left."""
        with self._locks.holding(place.directory, until):
            self._end(place, until)

    def all(self, parent: str) -> Mapping[str, bool]:
        """Name of each share that there is anything of -> whether it is served."""
        self._children.bury()
        names = [name for name in names_in(parent) if plan.is_name(name)]
        commands = [command for _, command in _processes()] if names else []
        return {
            name: any(plan.serves(command, Place(f"{parent}/{name}").root) for command in commands) for name in names
        }

    # --- inside

    def _prepare(self, place: Place, uid: int, group: str) -> socket.socket:
        """The cgroup is written down before it is made."""
        os.makedirs(os.path.dirname(place.directory), mode=0o711, exist_ok=True)
        os.mkdir(place.directory, 0o711)
        os.mkdir(place.root, 0o700)
        with open(place.group_file, "x", encoding="utf-8") as file:
            file.write(group)
        return _listen(place.socket, uid)

    def _enter(self, group: str) -> list[str]:
        """The files by which a process gets into it; made if missing."""
        if not group or not self._groups.make(group, RequestedLimits()):
            return []
        return [f"{directory}/cgroup.procs" for directory in self._groups.directories(group)]

    def _launch(
        self,
        what: str,
        root: str,
        mounts: Sequence[SharedMount],
        orders: Mapping[str, object],
        until: float,
        keep: int = -1,
    ) -> None:
        """`orders`: more of them; see `launcher`."""
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", launcher.__file__, what, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(keep,) if keep >= 0 else (),
            start_new_session=True,
            cwd="/",
        )
        self._children.add(child)
        assert child.stdin is not None
        assert child.stdout is not None
        with child.stdin, child.stdout:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps({"mounts": [mount.to_json() for mount in mounts], **orders}).encode())
                child.stdin.close()
            lines, is_whole = _read_lines(child.stdout.fileno(), until)
        if not is_whole:
            child.kill()  # and not waited for: the file system that holds it up may keep it a while still
            volume = mounts[int(lines[-2])].host_path if len(lines) > 1 else "a volume"
            raise deadline(f"{volume} does not answer in time: the server behind it may be gone; see the node's mounts")
        if what == "check" or lines[-1]:
            self._raise_told(child, lines[-1])

    def _raise_told(self, child: subprocess.Popen[bytes], told: bytes) -> None:
        """It has ended."""
        self._children.bury((child.pid,))
        if told:
            words = json.loads(told)
            raise TapmanagerError(words["kind"], words["message"])
        if child.returncode:
            raise internal(f"looking at the volumes failed ({child.returncode})")

    def _end(self, place: Place, until: float) -> None:
        until = min(until, time.monotonic() + _END_WAIT)
        killed: set[int] = set()
        while found := self._of(place):
            for pid in found:
                self._kill(pid, place)
            killed.update(found)
            if time.monotonic() >= until:
                raise TapmanagerError(
                    "failed-precondition",
                    f"process {found[0]}, which serves volumes to a VM, does not end: a volume's server may be gone",
                )
            threading.Event().wait(_END_POLL)
        self._children.bury(killed)
        if group := _text(place.group_file):
            self._groups.remove(group)
        if os.path.lexists(place.directory):
            _remove(place.directory)
            log.info("share.ended directory=%s", place.directory)

    def _kill(self, pid: int, place: Place) -> None:
        """If it is still one of the place's: its number may have gone to another process since it was read."""
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                if pid in self._of(place):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)

    def _of(self, place: Place) -> list[int]:
        in_group = {int(word) for file in self._files(_text(place.group_file)) for word in _text(file).split()}
        return sorted(in_group | {pid for pid, command in _processes() if plan.serves(command, place.root)})

    def _files(self, group: str) -> list[str]:
        return [f"{one}/cgroup.procs" for one in self._groups.directories(group)] if group else []

    def _find_program(self) -> tuple[str, bool]:
        """It, and whether it is the Rust one. Raises TapmanagerError."""
        wanted = (self._program,) if self._program else plan.PROGRAMS
        path = next((one for one in wanted if os.access(one, os.X_OK)), "")
        if not path:
            remedy = "install it (Debian 12: qemu-system-common; elsewhere: virtiofsd), or set shares.virtiofsd"
            raise unavailable(f"there is no virtiofsd at {', '.join(wanted)}; {remedy}")
        try:
            done = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise internal(f"{path} --version: {exc}") from exc
        return path, plan.is_rust(done.stdout)


class _Children:
    """Ours, to be buried when they have ended; those of an earlier life of this program are init's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[subprocess.Popen[bytes]] = []

    def add(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._all.append(child)
        self.bury()

    def bury(self, killed: Collection[int] = ()) -> None:
        """Those of `killed` are as good as dead; nobody else waits for one that is not."""
        with self._lock:
            dying = [child for child in self._all if child.pid in killed]
        for child in dying:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_WAIT)
        with self._lock:
            self._all = [child for child in self._all if child.poll() is None]


def _listen(path: str, uid: int) -> socket.socket:
    """Only `uid`, and root, may call."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        os.chown(path, uid, -1)
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def _read_lines(fd: int, until: float) -> tuple[list[bytes], bool]:
    """All that is told, and whether that came to an end in time. The last line is without an end: "" if there is none."""
    told = b""
    while len(told) < _LONGEST_ANSWER:
        left = until - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return told.split(b"\n"), False
        data = os.read(fd, _LONGEST_ANSWER)
        if not data:
            break
        told += data
    return told.split(b"\n"), True


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Root's: what another user calls his own process holds nobody up."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            command = _text(f"/proc/{entry}/cmdline")
            if ("virtiofsd" in command or launcher.__file__ in command) and _is_roots(entry):
                yield int(entry), command.split("\0")


def _is_roots(entry: str) -> bool:
    """By its real user: the owner of its directory in /proc is root's also for a process that hides from dumps."""
    return re.search(r"^Uid:\t0\t", _text(f"/proc/{entry}/status"), re.MULTILINE) is not None


def _remove(directory: str) -> None:
    """What is made there is files, and one directory that is empty here. All else is a volume's, and stays. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        with os.scandir(directory) as entries:
            for entry in entries:
                (os.rmdir if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
        os.rmdir(directory)


def _text(path: str) -> str:
    """ "" of what has gone. Raises OSError: what cannot be read may serve volumes still."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError as exc:
        if exc.errno not in _GONE:
            raise
        return ""
