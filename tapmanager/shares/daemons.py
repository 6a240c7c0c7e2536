"""The daemons that serve a VM: virtiofsd for its volumes, and passt for its network if another runtime made the pod's sandbox.
Starts them through `launcher`, finds them by their command lines, and stops them.

This program keeps no state. The directory of shares tells which shares exist, and /proc tells which processes serve them. So
after a kill at any step, the next call finds everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from tapmanager.errors import TapmanagerError, deadline, internal, invalid, unavailable, wrong_state
from tapmanager.kernel_files import names_in
from tapmanager.keyed_locks import KeyedLocks
from tapmanager.shares import launcher, passt, plan
from tapmanager.shares.passt import Network
from tapmanager.shares.plan import SharedMount

log = logging.getLogger(__name__)

_LONGEST_ANSWER = 65536
_FILE_MAX = "/proc/sys/fs/file-max"
# Errors that mean that a process, a cgroup or a file has gone. The last two occur if the kernel hides another user's process.
_GONE = (errno.ENOENT, errno.ESRCH, errno.ENODEV, errno.EACCES, errno.EPERM)
_VERSION_SECONDS = 10.0
# Where passt makes its socket, in its own mount namespace.
_PASSTS_SOCKET = f"{launcher.PASSTS_FOLDER}/{passt.SOCKET}"
# The part of the caller's time to use. If all were used, the caller would be gone before it learns which volume does not answer.
_TO_TELL = 0.1
# Seconds until a killed process has gone, unless the kernel waits for a volume's server.
_END_WAIT, _END_POLL = 10.0, 0.005


@dataclass(frozen=True, slots=True)
class Place:
    """The directory of one share."""

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

    @property
    def network(self) -> str:
        return f"{self.directory}/{passt.FOLDER}"

    @property
    def passt(self) -> str:
        return f"{self.directory}/{passt.NAME}"

    def passts_user(self) -> int:
        """0 without passt. While it starts, the folder is its own, and later only the socket."""
        for path in (self.network, f"{self.network}/{passt.SOCKET}"):
            with contextlib.suppress(FileNotFoundError):
                if user := os.lstat(path).st_uid:
                    return user
        return 0


@dataclass(frozen=True, slots=True)
class _Process:
    """`user`: the real one."""

    pid: int
    user: int
    command: Sequence[str]

    def serves_volumes(self, place: Place) -> bool:
        return self.user == 0 and plan.serves(self.command, place.root)

    def is_passt(self, place: Place, user: int) -> bool:
        """`user`: passt's. Another user can give his process any command line."""
        is_its = self.command[0] == place.passt or plan.serves(self.command, place.root)
        return user != 0 and self.user == user and is_its


class ShareDaemons:
    """Thread-safe. Calls for different VMs never wait for each other. `until`: a point in time of time.monotonic()."""

    def __init__(self, groups: VmCgroups, program: str = "", open_files: int = 0, passt: str = "") -> None:
        """`open_files`: how many files each daemon may have open; 0 means a share of the node's limit."""
        self._groups = groups
        self._program = program
        self._passt = passt
        self._open_files = open_files
        self._locks = KeyedLocks()
        self._children = _Children()

    def use_programs(self, virtiofsd: str, passt: str) -> None:
        """Sets the programs for future VMs; "" means the distribution's path. Running VMs keep theirs."""
        self._program, self._passt = virtiofsd, passt

    def check(self, mounts: Sequence[SharedMount], until: float) -> None:
        """Raises TapmanagerError for the first volume that cannot be shared, or if virtiofsd is missing."""
        self._find_program()
        self._launch("check", "/", mounts, {}, until - _TO_TELL * max(0.0, until - time.monotonic()))

    def require_passt(self) -> str:
        """The path of passt. Raises TapmanagerError (unavailable) if it is missing."""
        path = self._passt or passt.PROGRAM
        if path.startswith(f"{launcher.PASSTS_FOLDER}/"):
            raise invalid(
                f"shares.passt: {path} is below {launcher.PASSTS_FOLDER}, where passt has its own folder; move it"
            )
        if not os.access(path, os.X_OK):
            raise unavailable(f"passt is missing at {path}; install the package passt, or set shares.passt")
        return path

    def start(
        self,
        place: Place,
        uid: int,
        mounts: Sequence[SharedMount],
        until: float,
        group: str = "",
        network: Network | None = None,
    ) -> None:
        """Starts the daemons of a share. When this returns, QEMU may connect to virtiofsd, but only as user `uid`; and root to
        passt. Earlier daemons of the share are stopped first. `group`: the path of the daemons' cgroup; "" for this program's
        own."""
        with self._locks.holding(place.directory, until):
            self._end(place, until)
            try:
                self._prepare(place, group)
                if network is not None:
                    self._start_passt(place, network, group, until)
                if mounts or network is None:
                    self._start_virtiofsd(place, uid, mounts, group, until)
            except BaseException:
                with contextlib.suppress(TapmanagerError, OSError):
                    self._end(place, time.monotonic() + _END_WAIT)
                raise
        log.info("share.started directory=%s volumes=%d passt=%s", place.directory, len(mounts), network is not None)

    def end(self, place: Place, until: float) -> None:
        """Stops the daemons and removes the share. Afterwards no process holds a volume or a port. No error if there is none."""
        with self._locks.holding(place.directory, until):
            self._end(place, until)

    def all(self, parent: str) -> Mapping[str, bool]:
        """Name of each share of which anything exists -> whether its volumes are served."""
        self._children.bury()
        names = [name for name in names_in(parent) if plan.is_name(name)]
        running = list(_processes()) if names else []
        return {name: any(one.serves_volumes(Place(f"{parent}/{name}")) for one in running) for name in names}

    def networks(self, parent: str) -> Mapping[str, bool]:
        """Name of each share with passt -> whether passt runs."""
        self._children.bury()
        users = {
            name: user
            for name in names_in(parent)
            if plan.is_name(name) and (user := Place(f"{parent}/{name}").passts_user())
        }
        running = list(_processes()) if users else []
        return {
            name: any(one.is_passt(Place(f"{parent}/{name}"), user) for one in running) for name, user in users.items()
        }

    # --- inside

    def _start_virtiofsd(self, place: Place, uid: int, mounts: Sequence[SharedMount], group: str, until: float) -> None:
        program, rust = self._find_program()
        with _listen(place.socket, uid) as listener:
            command = list(plan.command_line(program, listener.fileno(), place.root, rust=rust))
            orders = {"command": command, **self._settling(group)}
            self._launch("serve", place.root, mounts, orders, until, keep=listener.fileno())

    def _start_passt(self, place: Place, network: Network, group: str, until: float) -> None:
        program = self.require_passt()
        os.mkdir(place.network, 0o700)
        os.chown(place.network, network.uid, -1)
        orders = {
            **dataclasses.asdict(network),
            "families": list(network.families),
            "program": program,
            "command": list(passt.command_line(network, place.passt, _PASSTS_SOCKET)),
            "folder": place.network,
            **self._settling(group),
        }
        self._launch("network", place.root, (), orders, until)
        # From now on, the folder says that nobody has exchanged the socket.
        os.chown(place.network, 0, -1)
        if len(network.dns.searches) > passt.MOST_SEARCHES:
            log.warning(
                "share.searches_left_out directory=%s: passt's DHCP has %d", place.directory, passt.MOST_SEARCHES
            )

    def _settling(self, group: str) -> Mapping[str, object]:
        """The cgroup and the limit of a daemon."""
        most = self._open_files or plan.most_open_files(int(_text(_FILE_MAX)))
        return {"groups": self._enter(group), "open_files": most}

    def _prepare(self, place: Place, group: str) -> None:
        """Prepares the directory. The file with the cgroup's path is written before the cgroup is made."""
        os.makedirs(os.path.dirname(place.directory), mode=0o711, exist_ok=True)
        os.mkdir(place.directory, 0o711)
        os.mkdir(place.root, 0o700)
        with open(place.group_file, "x", encoding="utf-8") as file:
            file.write(group)

    def _enter(self, group: str) -> list[str]:
        """The cgroup.procs files through which a process enters the cgroup, which is made if missing."""
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
        """`orders`: further orders for `launcher`."""
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
                child.stdin.write(json.dumps({"mounts": list(map(dataclasses.asdict, mounts)), **orders}).encode())
                child.stdin.close()
            lines, is_whole = _read_lines(child.stdout.fileno(), until)
        if not is_whole:
            child.kill()  # without waiting: the file system that blocks the process may block it for a while
            if what == "network":
                raise deadline("passt does not become ready in time; the node may be overloaded")
            volume = mounts[int(lines[-2])].host_path if len(lines) > 1 else "a volume"
            raise deadline(f"{volume} does not answer in time; its server may be gone, so check the node's mounts")
        if what == "network":
            self._raise_passts(child, lines)
        elif what == "check" or lines[-1]:
            self._raise_reported(child, lines[-1])

    def _raise_passts(self, child: subprocess.Popen[bytes], lines: Sequence[bytes]) -> None:
        """Raises the error of passt, or of its launcher. A passt that is ready has gone to the background."""
        self._children.bury((child.pid,))
        if child.returncode == 0:
            return
        if lines[-1].startswith(b"{"):
            self._raise_reported(child, lines[-1])
        # Without the complaints that there is no system logger.
        words = [line.decode(errors="replace").strip() for line in lines if b"syslog" not in line]
        raise internal(
            f"passt does not start: {'; '.join(filter(None, words[-3:])) or f'exit status {child.returncode}'}"
        )

    def _raise_reported(self, child: subprocess.Popen[bytes], reported: bytes) -> None:
        """Raises the error of a launcher that has ended."""
        self._children.bury((child.pid,))
        if reported:
            words = json.loads(reported)
            raise TapmanagerError(words["kind"], words["message"])
        if child.returncode:
            raise internal(f"checking the volumes failed ({child.returncode})")

    def _end(self, place: Place, until: float) -> None:
        until = min(until, time.monotonic() + _END_WAIT)
        killed: set[int] = set()
        while found := self._of(place):
            for pid in found:
                self._kill(pid, place)
            killed.update(found)
            if time.monotonic() >= until:
                raise wrong_state(f"process {found[0]}, which serves a VM, does not end; a volume's server may be gone")
            threading.Event().wait(_END_POLL)
        self._children.bury(killed)
        if group := _text(place.group_file):
            self._groups.remove(group)
        _remove(place.network)
        if os.path.lexists(place.directory):
            _remove(place.directory)
            log.info("share.ended directory=%s", place.directory)

    def _kill(self, pid: int, place: Place) -> None:
        """Kills the process if it still belongs to the share, because another process may have got its pid."""
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                if pid in self._of(place):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)

    def _of(self, place: Place) -> list[int]:
        in_group = {int(word) for file in self._files(_text(place.group_file)) for word in _text(file).split()}
        user = place.passts_user()
        its = {one.pid for one in _processes() if one.serves_volumes(place) or one.is_passt(place, user)}
        return sorted(in_group | its)

    def _files(self, group: str) -> list[str]:
        return [f"{one}/cgroup.procs" for one in self._groups.directories(group)] if group else []

    def _find_program(self) -> tuple[str, bool]:
        """The path of virtiofsd, and whether it is the Rust version. Raises TapmanagerError."""
        wanted = (self._program,) if self._program else plan.PROGRAMS
        path = next((one for one in wanted if os.access(one, os.X_OK)), "")
        if not path:
            remedy = "install it (Debian 12: qemu-system-common; elsewhere: virtiofsd), or set shares.virtiofsd"
            raise unavailable(f"virtiofsd is missing at {', '.join(wanted)}; {remedy}")
        try:
            done = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise internal(f"{path} --version: {exc}") from exc
        return path, plan.is_rust(done.stdout)


class _Children:
    """The children to reap when they have ended. init reaps the children of earlier runs of this program."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[subprocess.Popen[bytes]] = []

    def add(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._all.append(child)
        self.bury()

    def bury(self, killed: Collection[int] = ()) -> None:
        """Reaps ended children. Waits for those in `killed`, which will end soon."""
        with self._lock:
            dying = [child for child in self._all if child.pid in killed]
        for child in dying:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_WAIT)
        with self._lock:
            self._all = [child for child in self._all if child.poll() is None]


def _listen(path: str, uid: int) -> socket.socket:
    """A listening socket that only `uid` and root can connect to."""
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
    """The lines from the descriptor, and whether it was closed in time. The last item is an unfinished line, or ""."""
    reported = b""
    while len(reported) < _LONGEST_ANSWER:
        left = until - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return reported.split(b"\n"), False
        data = os.read(fd, _LONGEST_ANSWER)
        if not data:
            break
        reported += data
    return reported.split(b"\n"), True


def _processes() -> Iterator[_Process]:
    """Processes that may be daemons of a share, or launchers."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            command = _text(f"/proc/{entry}/cmdline")
            if any(name in command for name in ("virtiofsd", passt.NAME, launcher.__file__)):
                # Not the owner of the directory in /proc, which is root if a process is not dumpable.
                user = re.search(r"^Uid:\t(\d+)\t", _text(f"/proc/{entry}/status"), re.MULTILINE)
                if user:
                    yield _Process(int(entry), int(user[1]), command.split("\0"))


def _remove(directory: str) -> None:
    """Removes the files and the one empty directory that this program makes. Anything else belongs to a volume and stays. Raises
    OSError."""
    with contextlib.suppress(FileNotFoundError):
        with os.scandir(directory) as entries:
            for entry in entries:
                (os.rmdir if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
        os.rmdir(directory)


def _text(path: str) -> str:
    """The file's text; "" if the process has gone. Raises OSError for a file that cannot be read: its process may serve
    volumes."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError as exc:
        if exc.errno not in _GONE:
            raise
        return ""
