"""A libvirtd of the tests' own, with its own mounts: neither it nor the machine's libvirtd sees the other.

Its virtlogd runs beside it. Its qemu.conf has only the settings of our documents; everything else is the distribution's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PRIVATE = ("/etc/libvirt", "/run/libvirt", "/var/lib/libvirt", "/var/cache/libvirt", "/var/log/libvirt")
_LIBVIRTD_CONF = """\
unix_sock_rw_perms = "0700"
auth_unix_ro = "none"
auth_unix_rw = "none"
log_outputs = "3:file:/var/log/libvirt/libvirtd.log"
"""
_QEMU_CONF = "cgroup_controllers = [ ]\n"
# virtlogd rotates the log of a guest with much output.
_VIRTLOGD_CONF = "max_size = 65536\n"


class OwnLibvirtd:
    """Clients start with `enter` before their command, or use its `sockets`, which are visible everywhere. `settings`:
    more lines of libvirtd.conf."""

    def __init__(self, sockets: str = "", settings: str = "") -> None:
        mounts = "; ".join(f"mkdir -p {path}; mount -t tmpfs -o mode=755 virtshim-test {path}" for path in _PRIVATE)
        # As systemd mounts it, where the kernel has such pages.
        mounts += "; mkdir -p /dev/hugepages; mount -t hugetlbfs hugetlbfs /dev/hugepages || true"
        script = f"{mounts}; mkdir -p /run/libvirt/qemu; echo ready; exec sleep infinity"
        self._holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-e", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n", "no mounts of one's own can be made"
        self.enter = ("nsenter", "-m", "-t", str(self._holder.pid), "--")
        self.root = f"/proc/{self._holder.pid}/root"  # what is seen there
        self.pid_file = tempfile.mktemp(prefix="virtshim-libvirtd-", suffix=".pid")
        self._write("/etc/libvirt/qemu.conf", _QEMU_CONF)
        self._write("/etc/libvirt/virtlogd.conf", _VIRTLOGD_CONF)
        elsewhere = f'unix_sock_dir = "{sockets}"\n' if sockets else ""
        self._write("/etc/libvirt/libvirtd.conf", _LIBVIRTD_CONF + elsewhere + settings)
        self._uri = f"qemu+unix:///system?socket={sockets}/libvirt-sock" if sockets else "qemu:///system"
        self._process: subprocess.Popen[bytes] | None = None
        self._logd: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts it; returns when it answers. It has a private /run, because another libvirtd's pid file would end it."""
        if self._logd is None:
            self._logd = subprocess.Popen(
                [*self.enter, "virtlogd", "-p", "/run/libvirt/virtlogd.pid"], start_new_session=True
            )
            self._wait(lambda: self._inside("test", "-S", "/run/libvirt/virtlogd-sock").returncode == 0)
        self._process = subprocess.Popen(
            [*self.enter, "libvirtd", "-p", "/run/libvirt/libvirtd.pid"], start_new_session=True
        )
        Path(self.pid_file).write_text(str(self._process.pid))
        self._wait(lambda: self._inside("virsh", "-c", self._uri, "version").returncode == 0)

    def _wait(self, is_there: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not is_there():
            assert all(one is None or one.poll() is None for one in (self._logd, self._process)), self.log()
            assert time.monotonic() < until, self.log()
            threading.Event().wait(0.1)

    def kill(self) -> None:
        """Sends SIGKILL if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def domains(self) -> set[str]:
        """The names of all domains."""
        done = self._inside("virsh", "-c", self._uri, "list", "--all", "--name")
        assert done.returncode == 0, done.stderr
        return set(done.stdout.split())

    def log(self) -> str:
        return self._inside("cat", "/var/log/libvirt/libvirtd.log").stdout

    def end(self) -> None:
        for process in (self._process, self._logd):
            if process is not None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()
        Path(self.pid_file).unlink(missing_ok=True)

    def _inside(self, *command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.enter, *command], input=text, capture_output=True, text=True, timeout=60, check=False
        )

    def _write(self, path: str, text: str) -> None:
        done = self._inside("tee", path, text=text)
        assert done.returncode == 0, done.stderr


def missing() -> str:
    """Why this machine cannot have one; "" if it can."""
    for program in ("libvirtd", "virtlogd", "virsh", "unshare", "nsenter"):
        if not any(
            os.access(f"{directory}/{program}", os.X_OK) for directory in ("/usr/bin", "/usr/sbin", "/bin", "/sbin")
        ):
            return f"AREA libvirtd NOT TESTED: needs {program}; run make setup"
    return ""
