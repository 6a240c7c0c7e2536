"""Child daemons of `up` and `down`: started with a readiness socket, ended in order."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tapmanager.log_lines import FILE_VARIABLE
from virtshim.cli.keeping.last_lines import LastLines
from virtshim.cli.keeping.orphans import Orphans
from virtshim.domain.errors import PermissionRefused, Unavailable

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
