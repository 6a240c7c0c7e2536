"""Child daemons of `up` and `down`: starts them with a readiness socket, reaps orphaned QEMUs, stops them in order."""

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
from typing import IO, Final

from tapmanager.log_lines import FILE_VARIABLE
from virtshim.model.errors import PermissionRefused, Unavailable

# A daemon's output is passed on as it arrives. The last lines are kept, to explain why a daemon does not start.

_KEPT: Final = 12
_LONGEST: Final = 2000
_PIECE: Final = 1 << 16


class LastLines:
    """Copies a daemon's output to the descriptor `out` and keeps the last lines. Each start clears them."""

    def __init__(self, out: int = 2) -> None:
        self._out = out
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._thread: threading.Thread | None = None

    def follow(self, said: IO[bytes]) -> None:
        """Reads `said` on a thread until it ends."""
        self._lines.clear()
        self._thread = threading.Thread(target=self._run, args=(said,), name="last-lines", daemon=True)
        self._thread.start()

    def lines(self, patience: float = 2.0) -> list[str]:
        """The last lines of a daemon that has ended. Its children may still hold the output open, so this waits `patience`
        seconds at most."""
        if self._thread is not None:
            self._thread.join(patience)
        return [line[:_LONGEST] for line in list(self._lines) if line.strip()]

    def _run(self, said: IO[bytes]) -> None:
        rest = b""
        with said:
            while piece := os.read(said.fileno(), _PIECE):
                with contextlib.suppress(OSError):  # the terminal has gone
                    os.write(self._out, piece)
                *whole, rest = (rest + piece).split(b"\n")
                self._lines.extend(line.decode(errors="replace") for line in whole)
                rest = rest[-_LONGEST:]
        if rest:
            self._lines.append(rest.decode(errors="replace"))


# Orphaned QEMUs. libvirt forks twice to start a QEMU, so the QEMU's parent becomes the nearest ancestor that is a child
# subreaper. libvirt then waits until that parent has reaped the QEMU. The init of a container may reap only every few
# seconds, so this process does it instead. It must not reap the children that it started itself.

_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h


class Orphans:
    """Call `start_child` to start each own child, and `adopt` once to reap the orphans."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: dict[int, subprocess.Popen[bytes]] = {}
        self._child_started = threading.Event()

    def start_child(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Starts a child whose exit status is left to the caller, even if the child ends at once."""
        with self._lock:
            child = start()
            self._own[child.pid] = child
            self._child_started.set()
            return child

    def adopt(self) -> None:
        """Makes orphans below this process its children from now on, and reaps each as soon as it ends."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        threading.Thread(target=self._reap, name="orphans", daemon=True).start()

    def _reap(self) -> None:
        while True:
            try:
                # WNOWAIT does not reap yet: first find out whose child it is.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:  # without children there are no orphans either
                self._child_started.wait()
                self._child_started.clear()
                continue
            if ended is None:
                continue
            with self._lock:
                child = self._own.pop(ended.si_pid, None)
            if child is not None:
                child.wait()  # keeps the result for the caller
            else:
                os.waitid(os.P_PID, ended.si_pid, os.WEXITED)


_STOP_LIMIT_AT_START = 2.0


@dataclass(slots=True)
class Daemon:
    """One child daemon. `orphans` starts it, so that its exit status is not taken for an orphan's. The daemon runs in its
    own session: Ctrl-C reaches only this process, which stops the daemons in the right order."""

    name: str
    argv: Sequence[str]
    orphans: Orphans = field(default_factory=Orphans)
    log_file: str = ""
    """A file that the daemon writes its log to as well."""
    process: subprocess.Popen[bytes] | None = None
    said: LastLines | None = None
    """Reads the daemon's standard error, if set."""
    start_limit: float = 120.0
    stop_limit: float = 20.0
    """Seconds that the daemon has to get ready, and to end after SIGTERM."""
    _starting: _Starting | None = None

    def start(self, stopping: threading.Event | None = None) -> None:
        """Returns when the daemon has sent READY=1 (sd_notify(3)), or when `stopping` is set. Raises Unavailable if the
        daemon ends or is not ready in time."""
        self.launch()
        while (stopping is None or not stopping.is_set()) and not self.is_ready(0.05):
            pass

    def launch(self) -> None:
        """Starts the daemon and returns at once. `is_ready` says when it serves."""
        self._over()
        self._starting = starting = _Starting(self.start_limit)
        environment = {k: v for k, v in os.environ.items() if k not in ("WATCHDOG_USEC", "WATCHDOG_PID")}
        environment["NOTIFY_SOCKET"] = starting.address
        if self.log_file:
            environment[FILE_VARIABLE] = self.log_file
        if self.said is not None and sys.stderr.isatty():
            environment["FORCE_COLOR"] = "1"  # its output is a pipe, which would turn colours off
        err = None if self.said is None else subprocess.PIPE
        self.process = self.orphans.start_child(
            lambda: subprocess.Popen(
                list(self.argv), stdin=subprocess.DEVNULL, stderr=err, env=environment, start_new_session=True
            )
        )
        if self.said is not None and self.process.stderr is not None:
            self.said.follow(self.process.stderr)

    def is_ready(self, patience: float = 0.0) -> bool:
        """Whether the launched daemon serves; waits `patience` seconds at most. Raises Unavailable if the daemon has ended,
        or is not ready within its limit; it is then stopped."""
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
        """The exit code of a daemon that has ended; negative for a signal."""
        return None if self.process is None else self.process.poll()

    def last_lines(self) -> list[str]:
        return [] if self.said is None else self.said.lines()

    def stop(self) -> None:
        """Sends SIGTERM, then SIGKILL after a while; sooner if the daemon was not serving yet. Every daemon recovers from
        either."""
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
    """The socket to which a daemon reports that it is ready."""

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


# If `up` is killed, the kernel signals its daemons to stop, so that the next `up` finds the directory free.
ENDS_WITH_US: Final = ("setpriv", "--pdeathsig", "TERM", "--")


def _own_daemon(name: str, words: Sequence[str], config_file: str, orphans: Orphans | None) -> Daemon:
    """`words`: the Python module, and its command. The daemon writes a log file if `up` has made the directory for it."""
    argv = (*ENDS_WITH_US, sys.executable, "-m", *words, "--config", config_file)
    directory = f"{os.path.dirname(config_file)}/log"
    return Daemon(name, argv, orphans or Orphans(), f"{directory}/{name}.log" if os.path.isdir(directory) else "")


def tapmanager_daemon(config_file: str, orphans: Orphans | None = None) -> Daemon:
    return _own_daemon("tapmanager", ("tapmanager",), config_file, orphans)


def shares_daemon(config_file: str, orphans: Orphans | None = None) -> Daemon:
    return _own_daemon("virtshim-shares", ("tapmanager.shares",), config_file, orphans)


def virtshim_daemon(config_file: str, orphans: Orphans) -> Daemon:
    return _own_daemon("virtshim", ("virtshim", "serve"), config_file, orphans)


def proxy_daemon(config_file: str, orphans: Orphans) -> Daemon:
    return _own_daemon("virtshim-proxy", ("virtshim", "proxy"), config_file, orphans)


def last_words(daemon: Daemon) -> str:
    """The daemon's last lines, as the end of an error's text; "" if there are none."""
    said = "".join(f"\n  {line}" for line in daemon.last_lines())
    return f". Its last lines:{said}" if said else ""


def need_root() -> None:
    if os.geteuid() != 0:
        raise PermissionRefused(
            "a node needs root (network namespaces, libvirt's system driver); run this command with sudo"
        )
