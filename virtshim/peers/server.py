"""Serves other nodes: a thread for each connection, few at once. Whoever has no certificate of the CA gets a handshake only."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

from virtshim.model.errors import (
    InternalError,
    InvalidRequest,
    PermissionRefused,
    ResourceExhausted,
    ShimError,
    WrongState,
)
from virtshim.model.text import ListenAddress, escaped
from virtshim.peers.certificates import PeerCertificates, PeerFiles, named_node, reason
from virtshim.peers.link import TlsLink
from virtshim.peers.ports import PeerLink
from virtshim.system.pod_places import Places, PodPlaces
from virtshim.system.rate_limits import TroubleLog

log = structlog.get_logger(__name__)

# Seconds: for a handshake, for a node's first frame and for the answer to it, between two attempts to listen, to end all.
_HANDSHAKE: Final = 5.0
_FIRST: Final = 5.0
_AGAIN: Final = 30.0
_CLOSE: Final = 5.0
# The most connections of nodes, and the most handshakes, at the same time. A node may have two moves with two connections each,
# and needs some more for its questions.
_PLACES: Final = Places("connections", 24, 6, "wait until one ends", "wait until one ends", holder="peer")
_HANDSHAKES: Final = 16
# Threads: one for each of these, and some for handshakes that were cut to make room and are just ending.
_THREADS: Final = _PLACES.total + _HANDSHAKES + 8


def by_operation(handlers: Mapping[str, Callable[[PeerLink, dict[str, Any]], None]]) -> Callable[[PeerLink], None]:
    """Chooses the handler by "do" in the first message of a connection."""

    def handle(link: PeerLink) -> None:
        asked = link.receive(_FIRST)
        handler = handlers.get(wanted) if isinstance(wanted := asked.get("do"), str) else None
        if handler is None:
            known = ", ".join(sorted(handlers))
            raise InvalidRequest(f"do: there is no operation {escaped(repr(wanted), 80)}; this node knows {known}")
        handler(link, asked)

    return handle


class PeerServer:
    """`listen`: as in the settings; "" serves nothing. `handle` runs on a thread of its own for each connection. If it raises a
    ShimError, the peer gets this error; of another exception the peer learns only that there was one. If the address is taken or
    the certificate cannot be used, the daemon works on, and the server tries again. `handshake`: the limit of a handshake in
    seconds."""

    def __init__(
        self, listen: str, files: PeerFiles, handle: Callable[[PeerLink], None], *, handshake: float = _HANDSHAKE
    ) -> None:
        self._text = listen
        self._handshake = handshake
        self._certificates = PeerCertificates(files)
        self._handle = handle
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._places = PodPlaces(_PLACES)
        self._threads = threading.Semaphore(_THREADS)
        self._open: dict[socket.socket, threading.Thread] = {}
        # Connections without a place yet, the oldest first, and the address that each comes from.
        self._strangers: dict[socket.socket, str] = {}
        self._trouble = TroubleLog(log, "peers.serving")
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)

    def start(self) -> None:
        """The server listens when this returns, if the address is free."""
        if self._text:
            self._try_to_listen()
            self._thread.start()

    def close(self) -> None:
        """Cuts all connections. May be called twice, or without `start`."""
        self._stopping.set()
        with self._lock:
            ending = [one for one in (self._listener, *self._open) if one is not None]
            threads = list(self._open.values())
            for one in ending:
                _cut(one)
        until = time.monotonic() + _CLOSE
        for thread in [self._thread, *threads]:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        if self._listener is not None:
            self._listener.close()

    @property
    def port(self) -> int:
        """The actual port, if the address has port 0."""
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def _try_to_listen(self) -> None:
        address = ListenAddress.parse(self._text)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            listener = socket.create_server((address.host, address.port), family=family, backlog=_HANDSHAKES)
        except OSError as exc:
            remedy = "set peers.listen to an address of this node and a free port"
            self._trouble.met("peers.not_served", address=self._text, error=reason(exc), remedy=remedy)
            return
        with self._lock:
            self._listener = listener
        self._trouble.over()
        log.info("peers.listening", address=self._text)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._listener is None:
                if not self._stopping.wait(_AGAIN):
                    self._try_to_listen()
                continue
            if not self._threads.acquire(timeout=1.0):  # the kernel keeps the next ones waiting
                continue
            try:
                connected, address = self._listener.accept()
            except OSError as exc:
                self._threads.release()
                if not self._stopping.wait(1.0):
                    log.warning("peers.accept_failed", error=reason(exc))
                continue
            self._admit(connected, str(address[0]))

    def _admit(self, connected: socket.socket, host: str) -> None:
        """Starts the connection's thread. The caller has counted the thread in `_threads`."""
        try:
            threading.Thread(target=self._serve, args=(connected, host), name="peer", daemon=True).start()
        except RuntimeError as exc:  # no more threads
            log.warning("peers.no_thread", error=str(exc))
            connected.close()
            self._threads.release()

    def _serve(self, connected: socket.socket, host: str) -> None:
        try:
            if self._enter(connected, host):
                link = TlsLink(connected, self._certificates.current().server, is_server=True)
                self._trouble.over()
                link.peer = named_node(link.handshake(self._handshake), host)
                self._serve_node(link, connected)
        except WrongState as exc:
            text, _, remedy = str(exc).partition("; ")
            self._trouble.met("peers.no_certificate", error=text, remedy=remedy)
        except (OSError, PermissionRefused) as exc:
            log.warning("peers.refused", host=host, error=reason(exc) if isinstance(exc, OSError) else str(exc))
        finally:
            with self._lock:  # closed under the lock: nobody may cut a later connection with the same descriptor
                self._strangers.pop(connected, None)
                self._open.pop(connected, None)
                connected.close()
            self._threads.release()

    def _enter(self, connected: socket.socket, host: str) -> bool:
        """False if the server is closing. Cuts the oldest stranger of the address that has most, if there are too many, so that
        nobody keeps the nodes out by holding them all."""
        with self._lock:
            if len(self._strangers) >= _HANDSHAKES:
                most, _ = Counter(self._strangers.values()).most_common(1)[0]
                oldest = next(one for one, at in self._strangers.items() if at == most)
                del self._strangers[oldest]
                _cut(oldest)
            self._open[connected], self._strangers[connected] = threading.current_thread(), host
            return not self._stopping.is_set()

    def _serve_node(self, link: TlsLink, connected: socket.socket) -> None:
        try:
            with self._places.held(link.peer):
                with self._lock:
                    self._strangers.pop(connected, None)
                self._answer(link)
        except ResourceExhausted as exc:
            log.warning("peers.no_place", node=link.peer, error=str(exc))
            link.refuse(exc)
            link.close()

    def _answer(self, link: TlsLink) -> None:
        """Never raises. The connection has its place until the peer has read its error."""
        try:
            link.send({"ready": True}, _FIRST)
            self._handle(link)
        except ShimError as exc:
            log.warning("peers.failed", node=link.peer, kind=exc.kind.value, error=str(exc))
            link.refuse(exc)
        except Exception:
            log.exception("peers.crashed", node=link.peer)  # nothing above this thread would log it
            link.refuse(InternalError("an internal error; the log of virtshim there has the details"))
        link.close()


def _cut(one: socket.socket) -> None:
    """Shuts the connection down, which wakes the thread that serves it."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
