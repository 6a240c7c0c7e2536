"""The server: who may connect, one thread per connection, and an answer in every case.

SO_PEERCRED identifies a peer. root may have many connections, QEMUs' users a few, because a hostile QEMU must not use up the
connections that virtshim needs. Other users are refused. A peer that neither sends nor reads is dropped after a time limit.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import logging
import math
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from tapmanager import protocol
from tapmanager.errors import TapmanagerError, invalid
from tapmanager.fields import BadField, Json, as_object, refuse_unknown
from tapmanager.log_lines import LineLimit
from tapmanager.peer import Peer, peer_of

log = logging.getLogger(__name__)

R = TypeVar("R")

_BACKLOG = 512
# The longest time that a caller may allow for one request, in seconds.
_MAX_TIMEOUT = 3600.0
# What one user may cause to be logged: so many lines at once, and one each so many seconds after that.
_USER_LINES = 20
_USER_LINE_EVERY = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class ServerLimits:
    """`peer_seconds`: time to send the next request, or to read its answer. The others are numbers of connections. A QEMU needs
    one, and libvirt's seccomp sandbox keeps it from starting other processes. All QEMUs together must not starve root."""

    peer_seconds: float = 5.0
    of_root: int = 1024
    of_process: int = 4
    of_others: int = 256


USUAL = ServerLimits()


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """`fds`: the server closes them after sending."""

    ok: Json
    fds: list[int] = dataclasses.field(default_factory=list)


# (request, peer, until) -> Answer; raises TapmanagerError, OSError
Perform = Callable[[Json, Peer, float], Answer]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One request: the arguments, the sender, and the end of its time (time.monotonic())."""

    args: Json
    peer: Peer
    until: float


@dataclasses.dataclass(frozen=True)  # no slots: with them Python 3.11 cannot make a generic frozen dataclass
class Verb(Generic[R]):
    """`names`: of all its arguments; None for a verb that checks them itself."""

    run: Callable[[R, Call], Answer]
    names: Sequence[str] | None = ()
    open_to_qemu: bool = False


def run_verb(table: Mapping[str, Verb[R]], resources: R, request: Json, peer: Peer, until: float) -> Answer:
    """Runs one request; `until` is a point in time of time.monotonic(). Raises TapmanagerError; OSError from the kernel."""
    name = request.get("verb")
    verb = table.get(name) if isinstance(name, str) else None
    if verb is None:
        raise invalid(f"verb: {str(name)[:40]!r} is not one of {', '.join(table)}")
    if not (peer.is_root or verb.open_to_qemu):
        raise TapmanagerError("permission", f"{name} is for root only")
    try:
        args = as_object(request.get("args"), "args")
        if verb.names is not None:
            refuse_unknown(args, verb.names, "args")
        return verb.run(resources, Call(args, peer, until))
    except BadField as exc:
        raise invalid(str(exc)) from exc


def lock_file(path: str) -> int:
    """Takes an exclusive lock until this process ends. Returns the descriptor to keep. Raises TapmanagerError, which names the
    holder."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        message = f"another program (process {holder or 'unknown'}) holds {path}; stop it first, or choose other paths"
        raise TapmanagerError("already-exists", message) from exc
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def listen(path: str, group: int) -> socket.socket:
    """A listening socket with mode 0660 and owner root:`group`. The caller holds the lock, so an existing socket belongs to a
    dead process. Raises TapmanagerError if another kind of file is in the way, and OSError. Not thread-safe, because it
    changes the umask for a moment."""
    os.makedirs(os.path.dirname(path) or ".", mode=0o755, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise TapmanagerError(
                "already-exists", f"{path} exists and is not a socket; remove it, or choose another path"
            )
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    before = os.umask(0o117)
    try:
        sock.bind(path)
        os.chown(path, -1, group)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock


class Server:
    """Serves `listener` until `stop`. `qemu_uid`: the common user of VMs, None if there is none. `is_vm`: whether a user
    belongs to one VM. `peer`: identifies the other end of a connection. `monotonic`: the clock of the log's limits."""

    def __init__(
        self,
        listener: socket.socket,
        perform: Perform,
        qemu_uid: int | None,
        is_vm: Callable[[int], bool] = lambda _uid: False,
        limits: ServerLimits = USUAL,
        peer: Callable[[socket.socket], Peer] = peer_of,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_vm = is_vm
        self._limits = limits
        self._peer = peer
        self._listener = listener
        self._perform = perform
        self._qemu_uid = qemu_uid
        self._lock = threading.Lock()
        self._connections: collections.Counter[Peer] = collections.Counter()
        self._user_lines = LineLimit(_USER_LINES, _USER_LINE_EVERY, monotonic)
        self._working = 0
        self._idle = threading.Condition(self._lock)
        self._stopping = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._accept_all, name="accept", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout: float) -> bool:
        """Accepts no new requests, and waits up to `timeout` seconds for running ones. Returns True if all ended."""
        self._stopping.set()
        self._wake.close()  # not shutdown() on the listener: systemd may own it and keep it open
        self._thread.join(timeout=5.0)
        self._listener.close()
        self._woken.close()
        with self._lock:
            return self._idle.wait_for(lambda: self._working == 0, timeout=timeout)

    def _accept_all(self) -> None:
        self._listener.setblocking(False)
        wanted = select.poll()
        for sock in (self._listener, self._woken):
            wanted.register(sock, select.POLLIN)
        while not self._stopping.is_set():
            wanted.poll()
            try:
                conn, _ = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError as exc:
                if not self._stopping.is_set():
                    log.warning("server.accept_failed error=%s", exc)
                    self._stopping.wait(0.1)  # out of descriptors, some of which will be closed soon
                continue
            self._admit(conn)

    def _admit(self, conn: socket.socket) -> None:
        peer = self._peer(conn)
        refusal = self._refusal(peer)
        if refusal is not None:
            self._log(peer, logging.WARNING, "server.refused uid=%d pid=%d why=%s", peer.uid, peer.pid, refusal)
            with conn, contextlib.suppress(OSError):
                conn.setblocking(False)
                protocol.send_frame(conn, protocol.error(0, refusal.kind, str(refusal)))
            return
        with self._lock:
            self._connections[peer] += 1
        try:
            threading.Thread(
                target=self._serve_connection, args=(conn, peer), name=f"peer-{peer.pid}", daemon=True
            ).start()
        except RuntimeError as exc:  # out of threads: this peer must try again, the others are not affected
            log.warning("server.no_thread error=%s", exc)
            conn.close()
            self._forget(peer)

    def _refusal(self, peer: Peer) -> TapmanagerError | None:
        if not peer.is_root and peer.uid != self._qemu_uid and not self._is_vm(peer.uid):
            return TapmanagerError("permission", f"uid {peer.uid} may not use tapmanager")
        with self._lock:
            of_process = self._connections[peer]
            alike = sum(count for other, count in self._connections.items() if other.is_root == peer.is_root)
        if alike >= (self._limits.of_root if peer.is_root else self._limits.of_others):
            whose = "root" if peer.is_root else "VMs"
            return TapmanagerError("unavailable", f"{alike} connections of {whose} are open already; try again")
        if not peer.is_root and of_process >= self._limits.of_process:
            return TapmanagerError(
                "unavailable", f"{of_process} connections of process {peer.pid} are open already; try again"
            )
        return None

    def _serve_connection(self, conn: socket.socket, peer: Peer) -> None:
        try:
            with conn:
                conn.settimeout(self._limits.peer_seconds)
                while not self._stopping.is_set() and self._one_request(conn, peer):
                    pass
        except OSError as exc:
            self._log(peer, logging.INFO, "server.peer_dropped uid=%d pid=%d error=%s", peer.uid, peer.pid, exc)
        finally:
            self._forget(peer)

    def _log(self, peer: Peer, level: int, text: str, *words: object, exc_info: bool = False) -> None:
        """Logs an event that a peer caused."""
        unlogged = self._user_lines.unlogged(peer.uid) if peer.uid else 0
        if unlogged is None:
            return
        if unlogged:
            text, words = f"unlogged=%d {text}", (unlogged, *words)
        log.log(level, text, *words, exc_info=exc_info)

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            self._connections[peer] -= 1
            if not self._connections[peer]:
                del self._connections[peer]

    def _one_request(self, conn: socket.socket, peer: Peer) -> bool:
        """Serves one request. Returns False at the end of the connection."""
        try:
            received = protocol.recv_frame(conn)
        except protocol.FrameError as exc:
            protocol.send_frame(conn, protocol.error(0, "invalid", str(exc)))
            return False
        if received is None:
            return False
        request, fds = received
        protocol.close_all(fds)  # no verb uses descriptors
        if _peer_hung_up(conn):
            # The caller gave up before the request began, because tapmanager was busy. It may since have asked for the opposite.
            self._log(peer, logging.WARNING, "request.given_up verb=%s uid=%d", _verb(request), peer.uid)
            return False
        with self._lock:
            self._working += 1
        try:
            self._answer(conn, peer, request)
        finally:
            with self._lock:
                self._working -= 1
                self._idle.notify_all()
        return True

    def _answer(self, conn: socket.socket, peer: Peer, request: Json) -> None:
        number = request.get("id")
        number = number if isinstance(number, int) else 0
        started = time.monotonic()
        verb = _verb(request)
        answer = None
        try:
            answer = self._perform(request, peer, started + _seconds_of(request))
            body = protocol.answer(number, answer.ok)
            protocol.encode(body)  # an answer that is too long must become an error too
        except (TapmanagerError, protocol.FrameError, OSError) as exc:
            kind = exc.kind if isinstance(exc, TapmanagerError) else "internal"
            body = protocol.error(number, kind, str(exc)[:8000])
            words = (verb, kind, peer.uid, exc)
            self._log(peer, logging.WARNING, "request.failed verb=%s kind=%s uid=%d error=%s", *words)
        except Exception:  # noqa: BLE001  logged, with its traceback
            body = protocol.error(number, "internal", f"{verb} failed unexpectedly; tapmanager's log has the details")
            self._log(peer, logging.ERROR, "request.crashed verb=%s uid=%d", verb, peer.uid, exc_info=True)
        fds = answer.fds if answer is not None else []
        try:
            protocol.send_frame(conn, body, fds if "ok" in body else [])
        finally:
            protocol.close_all(fds)
        log.debug("request.done verb=%s ms=%.1f", verb, (time.monotonic() - started) * 1000)


def _seconds_of(request: Json) -> float:
    """Seconds that the caller waits. Raises TapmanagerError (invalid)."""
    value = request.get("timeout")
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise invalid("timeout: must be a positive number of seconds")
    return min(float(value), _MAX_TIMEOUT)


def _verb(request: Json) -> str:
    """The verb for the log, if it is a valid word."""
    name = str(request.get("verb"))[:40]
    return name if name.isidentifier() else "?"


def _peer_hung_up(conn: socket.socket) -> bool:
    poll = select.poll()
    poll.register(conn, select.POLLRDHUP)
    return bool(poll.poll(0))


def adopt(sock: socket.socket, path: str, group: int) -> socket.socket:
    """Adopts a listening socket that systemd opened at `path`, and sets mode 0660 and owner root:`group`. Raises TapmanagerError
    for a socket with another path or type, and OSError."""
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
        raise invalid("the activated socket is not ListenSequentialPacket=; correct tapmanager.socket")
    if sock.getsockname() != path:
        raise invalid(
            f"the activated socket is {sock.getsockname()}, but tapmanager.socket is {path}; set both to the same path"
        )
    os.chown(path, 0, group)
    os.chmod(path, 0o660)
    return sock
