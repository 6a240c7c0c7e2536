"""The door of the admin socket: who is not root is turned away before a byte of theirs is read.

The socket is root's and 0600, so that the kernel turns others away already. That holds as long as nobody changes the mode, and
not for programs that may pass by modes; so each connection's own credentials (SO_PEERCRED) count. gRPC does not tell them, so it
serves a socket behind this one, in a directory that root alone may enter, and the bytes are passed on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
from functools import partial
from typing import Final

import structlog

from virtshim.domain.errors import WrongState
from virtshim.primitives.threads import lasting

log = structlog.get_logger(__name__)

# The pid, uid and gid of a peer, unix(7).
_CREDENTIALS: Final = struct.Struct("iII")
_READ: Final = 64 << 10
# Connections at once. Each is some command of an operator's.
_MOST: Final = 64


class RootGate:
    """`allowed`: the only user that is let in. `again`: seconds before it is tried again when nobody can be let in, such as
    without a free descriptor."""

    def __init__(self, path: str, behind: str, allowed: int = 0, again: float = 0.1) -> None:
        self._again = again
        self._path = path
        self._behind = behind
        self._allowed = allowed
        self._places = threading.BoundedSemaphore(_MOST)
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self) -> None:
        """Raises WrongState if the socket cannot be made."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self._path).st_mode):
                raise WrongState(f"{self._path} is there and is not a socket; move it away")
            os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = os.umask(0o177)
        try:
            listener.bind(self._path)
            listener.listen(16)
        except OSError as exc:
            listener.close()
            raise WrongState(f"cannot listen on {self._path}: {exc.strerror}") from exc
        finally:
            os.umask(before)
        self._listener = listener
        self._thread = lasting(partial(self._accept, listener), "admin-gate")

    def stop(self) -> None:
        """Nobody is let in any more; connections end with the server behind."""
        if self._listener is None or self._thread is None:
            return
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._thread.join()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _accept(self, listener: socket.socket) -> None:
        """Until it is stopped, whatever fails on the way: without this thread no operator gets in any more."""
        fails = False
        while not self._stopping.is_set():
            try:
                self._let_in(listener.accept()[0])
                fails = False
            except (OSError, RuntimeError) as exc:  # no descriptor, a caller that has gone again, no thread
                if self._stopping.is_set():
                    return
                if not fails:
                    log.warning("admin.not_let_in", error=str(exc))
                fails = True
                self._stopping.wait(self._again)

    def _let_in(self, caller: socket.socket) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(caller.close)
            pid, uid, _ = _CREDENTIALS.unpack(
                caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid != self._allowed:
                log.warning("security.admin_refused", pid=pid, uid=uid)
                return
            if not self._places.acquire(blocking=False):
                log.warning("admin.crowded", connections=_MOST)
                return
            undo.callback(self._places.release)
            threading.Thread(target=self._serve, args=(caller,), name="admin-caller", daemon=True).start()
            undo.pop_all()

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as server:
                server.connect(self._behind)
                back = threading.Thread(target=_pass_on, args=(server, caller), name="admin-answers", daemon=True)
                back.start()
                _pass_on(caller, server)
                back.join()
        except (OSError, RuntimeError) as exc:  # also: no thread for the answers
            log.info("admin.broken_off", error=str(exc))
        finally:
            self._places.release()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Until one side ends; then both do."""
    with contextlib.suppress(OSError):
        while data := source.recv(_READ):
            target.sendall(data)
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)
