"""Child daemons of `up` and `down`: started with a readiness socket, restarted when they die, ended in order."""

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

from virtshim.cli.orphans import Orphans
from virtshim.domain.errors import Unavailable, WrongState

_START_LIMIT = 120.0
_STOP_LIMIT = 20.0


@dataclass(slots=True)
class Daemon:
    """One child, started by way of `orphans`, as its parent may have adopted others. It runs in a session of its own, so
    that Ctrl-C reaches it only through us, in the right order."""

    name: str
    argv: Sequence[str]
    orphans: Orphans = field(default_factory=Orphans)
    process: subprocess.Popen[bytes] | None = None

    def start(self, stopping: threading.Event | None = None) -> None:
        """Returns when it has said READY=1 (sd_notify(3)), or is told to stop meanwhile. Raises Unavailable if it ends or is
        silent instead."""
        with (
            tempfile.TemporaryDirectory(prefix="virtshim-up-") as directory,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as ready,
        ):
            ready.bind(f"{directory}/notify")
            environment = {k: v for k, v in os.environ.items() if k not in ("WATCHDOG_USEC", "WATCHDOG_PID")}
            environment["NOTIFY_SOCKET"] = f"{directory}/notify"
            self.process = self.orphans.start_child(
                lambda: subprocess.Popen(
                    list(self.argv), stdin=subprocess.DEVNULL, env=environment, start_new_session=True
                )
            )
            self._await(ready, self.process, stopping)

    def _await(self, ready: socket.socket, process: subprocess.Popen[bytes], stopping: threading.Event | None) -> None:
        until = time.monotonic() + _START_LIMIT
        while stopping is None or not stopping.is_set():
            if select.select([ready], [], [], 0.05)[0] and b"READY=1" in ready.recv(4096).split(b"\n"):
                return
            code = process.poll()
            if code is not None:
                raise Unavailable(f"{self.name} ended with code {code} before it was ready; its messages are above")
            if time.monotonic() > until:
                self.stop()
                raise Unavailable(f"{self.name} was not ready within {_START_LIMIT:g} s")

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after a while: all daemons survive either."""
        process = self.process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# A daemon whose `up` was killed is told to stop by the kernel, so that the next `up` finds the directory free.
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM", "--")


def tapmanager_daemon(config_file: str, orphans: Orphans | None = None) -> Daemon:
    argv = (*_ENDS_WITH_US, sys.executable, "-m", "tapmanager", "--config", config_file)
    return Daemon("tapmanager", argv, orphans or Orphans())


def shares_daemon(config_file: str, orphans: Orphans | None = None) -> Daemon:
    argv = (*_ENDS_WITH_US, sys.executable, "-m", "tapmanager.shares", "--config", config_file)
    return Daemon("virtshim-shares", argv, orphans or Orphans())


def virtshim_daemon(config_file: str, orphans: Orphans | None = None) -> Daemon:
    argv = (*_ENDS_WITH_US, sys.executable, "-m", "virtshim", "serve", "--config", config_file)
    return Daemon("virtshim", argv, orphans or Orphans())


def containerd_daemon(config_file: str, orphans: Orphans | None = None) -> Daemon:
    return Daemon("containerd", (*_ENDS_WITH_US, "containerd", "--config", config_file), orphans or Orphans())


def proxy_daemon(config_file: str, orphans: Orphans | None = None) -> Daemon:
    argv = (*_ENDS_WITH_US, sys.executable, "-m", "virtshim", "proxy", "--config", config_file)
    return Daemon("virtshim-proxy", argv, orphans or Orphans())


def need_root() -> None:
    if os.geteuid() != 0:
        raise WrongState("a node needs root (network namespaces, libvirt's system driver); run it with sudo")
