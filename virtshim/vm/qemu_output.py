"""Limits and keeps QEMU's standard output and error if libvirt is embedded: there is no virtlogd then to do so.

The embedded libvirt gives QEMU its log file, which a taken-over QEMU could fill without end. So vmwrapper replaces the file by a
pipe. QEMU holds both ends, so the kernel's limit holds even without virtshim, and output that does not fit is lost. When QEMU has
ended, virtshim reads the pipe and appends it to libvirt's log of the VM. If QEMU ends while virtshim is not running, its output
is lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Final

import structlog

from virtshim.model.errors import InternalError
from virtshim.system.threads import lasting
from virtshim.vm import qemu_process
from virtshim.vm.file_owner import QemuIds

log = structlog.get_logger(__name__)

# A pipe holds 64 KiB, or 1 MiB if QEMU asks the kernel for that.
_MOST_READ: Final = 1 << 20
_MOST_KEPT: Final = 64 << 10
_MOST_TOLD: Final = 2000
_APPENDING: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class QemuOutput:
    """`pipes`: the directory from `embed.output_pipes`. If it is "", because virtlogd limits the output, this does nothing."""

    def __init__(self, pipes: str) -> None:
        root = os.path.dirname(pipes)
        self._pipes = pipes
        self._logs = f"{root}/log/qemu"
        self._running = f"{root}/run/qemu"
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._poll = select.epoll()
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._closing, select.EPOLLIN)

    @contextlib.contextmanager
    def of_start(self, name: str, qemu: QemuIds | None) -> Iterator[Callable[[], str]]:
        """Wraps the VM's start. Yields a function that, after a failed start, moves QEMU's output to the log and returns
        it. Raises InternalError."""
        if not self._pipes:
            yield lambda: ""
            return
        path = f"{self._pipes}/{name}"
        reader = _made(path, qemu)
        try:
            yield lambda: _shown(self._kept(name, reader))
        except BaseException:
            os.close(reader)
            raise
        else:
            self._follow_or_lose(name, reader)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def follow(self, name: str, domain: uuid.UUID) -> None:
        """Follows a VM that an earlier virtshim has started. Does nothing for a VM without a pipe, or one that is followed."""
        with self._lock:
            if not self._pipes or name in self._names.values():
                return
        pid = qemu_process.find(self._running, name, domain)
        reader = None if pid is None else _reopened(pid)
        if reader is not None:
            self._follow_or_lose(name, reader)

    def close(self) -> None:
        """A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.eventfd_write(self._closing, 1)
        if self._thread is not None:
            self._thread.join()
        for reader in self._names:
            os.close(reader)
        self._poll.close()
        os.close(self._closing)

    def _follow_or_lose(self, name: str, reader: int) -> None:
        """A started VM must not fail because its output cannot be followed."""
        try:
            self._follow(name, reader)
        except Exception as exc:  # noqa: BLE001  no thread, no descriptor
            os.close(reader)
            log.warning("qemu.output.not_followed", name=name, error=str(exc))

    def _follow(self, name: str, reader: int) -> None:
        """Registers for no event: epoll always reports the hang-up that follows the last writer's end."""
        with self._lock:
            if self._closed:
                os.close(reader)
                return
            if self._thread is None:
                self._thread = lasting(self._run, "qemu-output")
            # The thread looks the name up under this lock, as soon as the kernel reports the end.
            self._poll.register(reader, 0)
            self._names[reader] = name

    def _run(self) -> None:
        while True:
            for reader, _ in self._poll.poll():
                if reader == self._closing:
                    return
                with self._lock:
                    name = self._names[reader]
                try:
                    self._kept(name, reader)
                except Exception:  # any error: the output of other VMs must be kept
                    log.exception("qemu.output.crashed", name=name)
                with self._lock:
                    self._poll.unregister(reader)
                    del self._names[reader]
                os.close(reader)

    def _kept(self, name: str, reader: int) -> bytes:
        """Appends the end of the pipe's content to the log, and returns it."""
        words = _read(reader)[-_MOST_KEPT:]
        if not words:
            return words
        try:
            with open(os.open(f"{self._logs}/{name}.log", _APPENDING, 0o600), "wb") as file:
                file.write(words)
        except OSError as exc:
            log.warning("qemu.output.lost", name=name, error=exc.strerror, said=_shown(words))
        return words


def _made(path: str, qemu: QemuIds | None) -> int:
    """Makes a pipe that only QEMU's user may open, and returns its reading end."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.mkfifo(path, 0o600)
        if qemu is not None:
            os.chown(path, qemu.uid, -1, follow_symlinks=False)
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise InternalError(f"the pipe {path} for QEMU's output cannot be made: {exc.strerror}") from exc


def _reopened(pid: int) -> int | None:
    """Opens only a pipe, because QEMU may have replaced its standard error."""
    try:
        found = os.open(f"/proc/{pid}/fd/2", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISFIFO(os.fstat(found).st_mode):
            return None
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    finally:
        os.close(found)


def _read(reader: int) -> bytes:
    words = b""
    with contextlib.suppress(BlockingIOError):
        while len(words) < _MOST_READ and (more := os.read(reader, _MOST_KEPT)):
            words += more
    return words


def _shown(words: bytes) -> str:
    """The end of QEMU's output, for a message."""
    text = words.decode(errors="replace").strip()[-_MOST_TOLD:]
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
