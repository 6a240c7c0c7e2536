"""Child daemons of `up` and `down`: started with a readiness socket, ended in order."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Final, Protocol, TypeVar

from tapmanager.log_lines import FILE_VARIABLE
from virtshim.model.errors import PermissionRefused, Unavailable

# What a daemon says: passed on as it comes, and its last lines kept for whoever has to tell why it does not come up.

_KEPT: Final = 12
_LONGEST: Final = 2000
_PIECE: Final = 1 << 16


class LastLines:
    """`out`: the descriptor that all of it goes to. A start begins anew."""

    def __init__(self, out: int = 2) -> None:
        self._out = out
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._thread: threading.Thread | None = None

    def follow(self, said: IO[bytes]) -> None:
        """Until its end."""
        self._lines.clear()
        self._thread = threading.Thread(target=self._run, args=(said,), name="last-lines", daemon=True)
        self._thread.start()

    def lines(self, patience: float = 2.0) -> list[str]:
        """Of a daemon that has ended. What it has left behind may have its output open still: that is not waited for."""
        if self._thread is not None:
            self._thread.join(patience)
        return [line[:_LONGEST] for line in list(self._lines) if line.strip()]

    def _run(self, said: IO[bytes]) -> None:
        rest = b""
        with said:
            while piece := os.read(said.fileno(), _PIECE):
                with contextlib.suppress(OSError):  # a terminal that is gone
                    os.write(self._out, piece)
                *whole, rest = (rest + piece).split(b"\n")
                self._lines.extend(line.decode(errors="replace") for line in whole)
                rest = rest[-_LONGEST:]
        if rest:
            self._lines.append(rest.decode(errors="replace"))


# Takes in the QEMUs whose parent has ended, as init would. Must not take the ends of this process's own children.
#
# libvirt forks twice for a QEMU, so its parent is the nearest process above that asked for orphans. libvirt waits
# until that parent has reaped QEMU, and the init of a container may do so only every few seconds.

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


_STOP_LIMIT_AT_START = 2.0


@dataclass(slots=True)
class Daemon:
    """One child, started by way of `orphans`, as its parent may have adopted others. It runs in a session of its own, so
    that Ctrl-C reaches it only through us, in the right order."""

    name: str
    argv: Sequence[str]
    orphans: Orphans = field(default_factory=Orphans)
    log_file: str = ""
    """Where it keeps its log, too."""
    process: subprocess.Popen[bytes] | None = None
    said: LastLines | None = None
    """Its standard error goes through this one, if there is one."""
    start_limit: float = 120.0
    stop_limit: float = 20.0
    """Seconds until it is ready, and from SIGTERM to its end."""
    _starting: _Starting | None = None

    def start(self, stopping: threading.Event | None = None) -> None:
        """Returns when it has said READY=1 (sd_notify(3)), or is told to stop meanwhile. Raises Unavailable if it ends or is
        silent instead."""
        self.launch()
        while (stopping is None or not stopping.is_set()) and not self.is_ready(0.05):
            pass

    def launch(self) -> None:
        """Returns at once: `is_ready` says when it serves."""
        self._over()
        self._starting = starting = _Starting(self.start_limit)
        environment = {k: v for k, v in os.environ.items() if k not in ("WATCHDOG_USEC", "WATCHDOG_PID")}
        environment["NOTIFY_SOCKET"] = starting.address
        if self.log_file:
            environment[FILE_VARIABLE] = self.log_file
        if self.said is not None and sys.stderr.isatty():
            environment["FORCE_COLOR"] = "1"  # it writes into a pipe
        err = None if self.said is None else subprocess.PIPE
        self.process = self.orphans.start_child(
            lambda: subprocess.Popen(
                list(self.argv), stdin=subprocess.DEVNULL, stderr=err, env=environment, start_new_session=True
            )
        )
        if self.said is not None and self.process.stderr is not None:
            self.said.follow(self.process.stderr)

    def is_ready(self, patience: float = 0.0) -> bool:
        """After `launch`. Raises Unavailable if it has ended or was silent for too long; it has ended then."""
        starting, process = self._starting, self.process
        if starting is None or process is None:
            return True
        if starting.said_ready(patience):
            self._over()
            return True
        code = process.poll()
        if code is not None:
            self._over()
            raise Unavailable(f"{self.name} ended with code {code} before it was ready")
        if time.monotonic() > starting.until:
            self.stop()
            raise Unavailable(f"{self.name} was not ready within {self.start_limit:g} s")
        return False

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def code(self) -> int | None:
        """Of one that has ended; negative for a signal."""
        return None if self.process is None else self.process.poll()

    def last_lines(self) -> list[str]:
        return [] if self.said is None else self.said.lines()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after a while, soon if it was not serving yet: all daemons survive either."""
        process, limit = self.process, self.stop_limit if self._starting is None else _STOP_LIMIT_AT_START
        self._over()
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _over(self) -> None:
        if self._starting is not None:
            self._starting.close()
            self._starting = None


class _Starting:
    """The socket on which a daemon says that it is ready."""

    def __init__(self, limit: float) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="virtshim-up-")
        self.address = f"{self._directory.name}/notify"
        self.until = time.monotonic() + limit
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(self.address)

    def said_ready(self, patience: float) -> bool:
        readable = select.select([self._socket], [], [], patience)[0]
        return bool(readable) and b"READY=1" in self._socket.recv(4096).split(b"\n")

    def close(self) -> None:
        self._socket.close()
        self._directory.cleanup()


# A daemon whose `up` was killed is told to stop by the kernel, so that the next `up` finds the directory free.
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM", "--")


def _log_file(config_file: str, name: str) -> str:
    """In a directory that `up` has made."""
    directory = f"{os.path.dirname(config_file)}/log"
    return f"{directory}/{name}.log" if os.path.isdir(directory) else ""


def tapmanager_daemon(config_file: str, orphans: Orphans | None = None) -> Daemon:
    argv = (*_ENDS_WITH_US, sys.executable, "-m", "tapmanager", "--config", config_file)
    return Daemon("tapmanager", argv, orphans or Orphans(), _log_file(config_file, "tapmanager"))


def shares_daemon(config_file: str, orphans: Orphans | None = None) -> Daemon:
    argv = (*_ENDS_WITH_US, sys.executable, "-m", "tapmanager.shares", "--config", config_file)
    return Daemon("virtshim-shares", argv, orphans or Orphans(), _log_file(config_file, "virtshim-shares"))


def virtshim_daemon(config_file: str, orphans: Orphans | None = None) -> Daemon:
    argv = (*_ENDS_WITH_US, sys.executable, "-m", "virtshim", "serve", "--config", config_file)
    return Daemon("virtshim", argv, orphans or Orphans(), _log_file(config_file, "virtshim"))


def containerd_daemon(config_file: str, orphans: Orphans | None = None) -> Daemon:
    return Daemon("containerd", (*_ENDS_WITH_US, "containerd", "--config", config_file), orphans or Orphans())


def proxy_daemon(config_file: str, orphans: Orphans | None = None) -> Daemon:
    argv = (*_ENDS_WITH_US, sys.executable, "-m", "virtshim", "proxy", "--config", config_file)
    return Daemon("virtshim-proxy", argv, orphans or Orphans(), _log_file(config_file, "virtshim-proxy"))


def need_root() -> None:
    if os.geteuid() != 0:
        raise PermissionRefused("a node needs root (network namespaces, libvirt's system driver); run it with sudo")
