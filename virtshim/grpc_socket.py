"""A gRPC server's Unix socket: who may serve it; root's alone from its first moment."""

from __future__ import annotations

import fcntl
import os
import stat

import grpc

from virtshim.domain.errors import WrongState


class SocketLock:
    """Held as long as a process serves (or is about to serve) a socket path. grpc silently takes over a live socket,
    so the lock comes first."""

    def __init__(self, socket_path: str) -> None:
        """Raises WrongState if another process holds it."""
        self._fd = os.open(f"{socket_path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise WrongState(
                f"another virtshim (pid {holder or 'unknown'}) serves {socket_path}; stop it first"
            ) from exc
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


def listen(server: grpc.Server, path: str) -> None:
    """Has the server listen on `path`, whose `SocketLock` the caller holds; a socket that is left there is removed. WrongState
    for anything else there, or if it cannot be listened on."""
    _remove_stale(path)
    before = os.umask(0o177)
    try:
        if not server.add_insecure_port(f"unix:{path}"):
            raise WrongState(f"cannot listen on {path}")
    except RuntimeError as exc:
        raise WrongState(f"cannot listen on {path}: {exc}") from exc
    finally:
        os.umask(before)
    os.chmod(path, 0o600)


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise WrongState(f"{path} is there and is not a socket; move it away or set another path")
    os.unlink(path)
