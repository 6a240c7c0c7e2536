"""A gRPC server's Unix socket: its lock, and its mode, which only ever lets root in."""

from __future__ import annotations

import os
import stat
from typing import Protocol

from virtshim.model.errors import PermissionRefused, WrongState
from virtshim.system.files import FileLocked, lock_file


class CanListen(Protocol):
    """gRPC's servers, with threads or with an event loop."""

    def add_insecure_port(self, address: str) -> int: ...


class SocketLock:
    """A lock for serving a socket path, because grpc silently takes over a live socket."""

    def __init__(self, socket_path: str) -> None:
        """Makes the directory and takes the lock. Raises WrongState if another process has it, or if the path is unusable;
        PermissionRefused if the caller is not root."""
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
            raise WrongState(f"{found}; move it away, or choose another path in the settings") from exc

    def release(self) -> None:
        os.close(self._descriptor)


def listen(server: CanListen, path: str) -> None:
    """Makes the server listen on `path`, whose `SocketLock` the caller has. Removes a stale socket. WrongState for any other file
    there, or if the server cannot listen."""
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
        raise WrongState(f"{path} exists and is not a socket; move it away or set another path")
    os.unlink(path)
