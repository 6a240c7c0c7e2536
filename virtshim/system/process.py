"""Runs other programs; nothing else in the daemon does.

A program gets an argument list (never a shell line), a clean environment, /dev/null as stdin, umask 077 and its own process
group. When `run` returns or raises, nothing of that group is left, unless a file system hangs the program in the kernel: then
it ends as soon as the kernel lets it. A program that must outlive the call has to leave the group (setsid).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from virtshim.model.errors import DeadlineExceeded, InternalError
from virtshim.model.text import printable_text

ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
_CHUNK = 1 << 16
_CANCEL_POLL = 0.2
# More than a pipe holds (1 MiB, fs.pipe-max-size): reads all that a program left, but ends if somebody still writes.
_PIPE_CHUNKS = 32
_WIDE_PIPE = 1 << 20
# Seconds after which a killed program is left to the kernel.
_UNKILLABLE = 5.0


@dataclass(frozen=True, slots=True)
class Finished:
    """`returncode`: negative for a signal. `stdout`, `stderr`: the first bytes, up to the limit."""

    returncode: int
    stdout: bytes
    stderr: bytes

    def summary(self) -> str:
        """The end of the program's output, for an error message: one line, printable, at most 400 characters."""
        text = (self.stderr.strip() or self.stdout.strip()).decode(errors="replace")
        line = " ".join(text.split())
        said = printable_text(line[-400:])
        if self.returncode < 0:
            return f"killed by signal {-self.returncode}" + (f": {said}" if said else "")
        return said or f"no output, exit code {self.returncode}"


@dataclass(slots=True)
class _Captured:
    """The beginning of an output stream."""

    limit: int
    data: bytearray

    def take(self, chunk: bytes) -> None:
        self.data += chunk[: self.limit - len(self.data)]


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    name: str = "",
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    cancelled: threading.Event | None = None,
    output_limit: int = 1 << 20,
) -> Finished:
    """Runs `argv` to its end and returns its output, whatever its exit code.

    `timeout`: seconds. `name`: for messages. `pass_fds`: keep their numbers. `environment`: added to the clean one. Output of a
    stream beyond `output_limit` bytes is dropped. `argv` must have no secrets, because every local user can read it. Raises
    DeadlineExceeded (time over or `cancelled` set; the whole process group is killed) and InternalError (it cannot be started).
    """
    deadline = time.monotonic() + timeout
    child = _started(argv, subprocess.DEVNULL, environment, pass_fds)
    assert child.stdout is not None
    assert child.stderr is not None
    out, err = _Captured(output_limit, bytearray()), _Captured(output_limit, bytearray())
    try:
        with child.stdout, child.stderr:
            _collect(child.pid, {child.stdout: out, child.stderr: err}, name or argv[0], deadline, cancelled)
    finally:
        # The child is not reaped yet, so its number still names this group.
        os.killpg(child.pid, signal.SIGKILL)
        _reap(child)
    return Finished(child.returncode, bytes(out.data), bytes(err.data))


@dataclass(frozen=True, slots=True)
class Piped:
    """A running program. `feed` and `answers`: its standard input and output, non-blocking. `end`: waits for the program's
    end for some seconds, then kills it."""

    feed: int
    answers: int
    end: Callable[[float], Finished]


@contextlib.contextmanager
def piped(argv: Sequence[str]) -> Iterator[Piped]:
    """Starts `argv` with pipes for its input and output. Nothing of its group is left afterwards. If it writes more to
    standard error than a pipe holds, it blocks. Raises as `run`."""
    child = _started(argv, subprocess.PIPE, None, ())
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        for stream in (child.stdin, child.stdout, child.stderr):
            os.set_blocking(stream.fileno(), False)
        for stream in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):  # fs.pipe-user-pages-soft limits other users than root
                fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, _WIDE_PIPE)
        yield Piped(child.stdin.fileno(), child.stdout.fileno(), functools.partial(_ended, child))
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            _reap(child)
        for stream in (child.stdin, child.stdout, child.stderr):
            stream.close()


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Of a killed child. If it hangs in the kernel, Python reaps it when it starts another program."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_UNKILLABLE)


def _ended(child: subprocess.Popen[bytes], timeout: float) -> Finished:
    try:
        child.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        _reap(child)
    assert child.stderr is not None
    said = _Captured(_CHUNK, bytearray())
    _drain(child.stderr.fileno(), said, chunks=_PIPE_CHUNKS)
    # A program that hangs in the kernel ends by the signal as soon as the kernel lets it.
    return Finished(-signal.SIGKILL if child.returncode is None else child.returncode, b"", bytes(said.data))


def _started(
    argv: Sequence[str], stdin: int, environment: Mapping[str, str] | None, pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv,
            bufsize=0,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={**ENVIRONMENT, **(environment or {})},
            start_new_session=True,
            umask=0o077,
            pass_fds=pass_fds,
        )
    except (OSError, ValueError) as exc:
        name, reason = (
            (exc.filename, exc.strerror) if isinstance(exc, OSError) else (argv[0], "an argument holds a NUL byte")
        )
        raise InternalError(f"cannot run {name}: {reason}; is its package installed?") from exc


def _collect(
    pid: int,
    streams: Mapping[IO[bytes], _Captured],
    name: str,
    deadline: float,
    cancelled: threading.Event | None,
) -> None:
    """Reads until the program itself has ended. Does not wait for its children, which may keep the pipes open."""
    pidfd = os.pidfd_open(pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ)
            for stream, captured in streams.items():
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, captured)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(f"{name} took too long and was killed")
                if cancelled is not None and cancelled.is_set():
                    raise DeadlineExceeded(f"{name} was stopped: the caller gave up")
                ready = selector.select(left if cancelled is None else min(left, _CANCEL_POLL))
                if any(key.fd == pidfd for key, _ in ready):
                    break
                for key, _ in ready:
                    if not _drain(key.fd, key.data, chunks=1):
                        selector.unregister(key.fileobj)
            os.killpg(pid, signal.SIGKILL)
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    _drain(key.fd, key.data, chunks=_PIPE_CHUNKS)
    finally:
        os.close(pidfd)


def _drain(fd: int, captured: _Captured, *, chunks: int) -> bool:
    """Reads what is there, at most `chunks`. False at end of file."""
    for _ in range(chunks):
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        captured.take(chunk)
    return True
