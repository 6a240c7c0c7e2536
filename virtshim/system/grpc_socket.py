"""A gRPC server's Unix socket: who may serve it; root's alone from its first moment."""

from __future__ import annotations

import os
import stat
from typing import Protocol

from virtshim.model.errors import PermissionRefused, WrongState
from virtshim.system.files import FileLocked, lock_file


class CanListen(Protocol):
    """gRPC's servers, with threads or an event loop."""

    def add_insecure_port(self, address: str) -> int: ...


class SocketLock:
    """Held as long as a process serves (or is about to serve) a socket path. grpc silently takes over a live socket,
    so the lock comes first."""

    def __init__(self, socket_path: str) -> None:
        """Makes its directory. Raises WrongState if another process holds it, or it cannot be there; PermissionRefused for who
        is not root."""
        directory = os.path.dirname(socket_path)
        try:
            os.makedirs(directory, mode=0o711, exist_ok=True)
            self._descriptor = lock_file(f"{socket_path}.lock")
        except FileLocked as exc:
            raise WrongState(
                f"another virtshim (pid {exc.holder or 'unknown'}) serves {socket_path}; stop it first"
            ) from exc
        except OSError as exc:
            found = f"{exc.filename or directory} cannot be used: {exc.strerror}"
            if isinstance(exc, PermissionError) and os.geteuid() != 0:
                raise PermissionRefused(f"{found}; run this as root") from exc
            raise WrongState(f"{found}; move it away, or choose another place in the settings") from exc

    def release(self) -> None:
        os.close(self._descriptor)


def listen(server: CanListen, path: str) -> None:
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
