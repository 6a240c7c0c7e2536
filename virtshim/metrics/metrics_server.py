"""Serves `GET /metrics` over HTTP, and nothing else. There are few connections at once, each for one answer and limited in time.

It blocks only threads of its own, so the proxy, whose event loop must not wait, can use it like `virtshim serve`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

import h11
import structlog

from virtshim.model.text import ListenAddress

log = structlog.get_logger(__name__)

# Seconds: to receive a request, to send an answer, between two attempts to listen.
_REQUEST: Final = 5.0
_ANSWER: Final = 20.0
_AGAIN: Final = 30.0
_CONNECTIONS: Final = 8
# Threads: for the connections, and for displaced clients whose answers are still being made.
_SERVED: Final = 2 * _CONNECTIONS
_HEAD: Final = 16 << 10
_PIECE: Final = 64 << 10

# The client's Accept header -> content type and body.
Render = Callable[[str], tuple[str, bytes]]


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class MetricsServer:
    """Only root may use a Unix socket. If the address is taken, the daemon works on and the server tries again."""

    def __init__(self, address: str, render: Render) -> None:
        self._text = address
        self._address = ListenAddress.parse(address)
        self._is_local = bool(self._address.host) and ipaddress.ip_address(self._address.host).is_loopback
        self._render = render
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        # The oldest first, and whether they have asked.
        self._open: dict[socket.socket, bool] = {}
        self._places = threading.Semaphore(_SERVED)
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """The server listens when this returns, if the address is free."""
        self._try_to_listen()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            if self._listener is not None:
                with contextlib.suppress(OSError):
                    self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join()
        if self._listener is not None:
            self._listener.close()
            if self._address.path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._address.path)

    @property
    def port(self) -> int:
        """The actual port, if the address has port 0."""
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def _try_to_listen(self) -> None:
        try:
            listener = _listen(self._address)
        except OSError as exc:
            log.warning(
                "metrics.not_served",
                address=self._text,
                error=exc.strerror or str(exc),
                remedy="set metrics.address to a free address",
                next_try_s=_AGAIN,
            )
            return
        with self._lock:
            self._listener = listener
        log.info("metrics.serving", address=self._text)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._listener is None:
                self._stopping.wait(_AGAIN)
                if not self._stopping.is_set():
                    self._try_to_listen()
                continue
            if not self._places.acquire(timeout=1.0):  # the kernel keeps the next clients waiting
                continue
            try:
                connection, _ = self._listener.accept()
            except OSError as exc:
                self._places.release()
                if not self._stopping.is_set():
                    log.warning("metrics.accept_failed", error=str(exc))
                    self._stopping.wait(1.0)  # probably out of descriptors; some will be released
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        """Takes a place for the connection and starts its thread, which gives the place back."""
        self._make_room(connection)
        try:
            threading.Thread(target=self._serve, args=(connection,), name="metrics-client", daemon=True).start()
        except RuntimeError as exc:  # no more threads
            log.warning("metrics.no_thread", error=str(exc))
            connection.close()
            self._forget(connection)
            self._places.release()

    def _make_room(self, connection: socket.socket) -> None:
        """Closes the oldest connection without a request, or else the oldest of all, so that nobody can block the server by
        holding all connections."""
        with self._lock:
            if len(self._open) >= _CONNECTIONS:
                oldest = next((one for one, has_asked in self._open.items() if not has_asked), next(iter(self._open)))
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # ends its thread
            self._open[connection] = False

    def _mark_as_asking(self, connection: socket.socket) -> None:
        with self._lock:
            if connection in self._open:
                self._open[connection] = True

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(connection, None)

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._answer(connection)
        except OSError:  # the client has disconnected, is too slow, or was displaced
            pass
        except Exception:
            log.exception("metrics.crashed")  # nothing above this thread would log it
        finally:
            self._forget(connection)  # before the descriptor's number can be reused
            connection.close()
            self._places.release()

    def _answer(self, connection: socket.socket) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD)
        status, kind, body = 200, "text/plain; charset=utf-8", b""
        try:
            accepted = _read_request(http, connection, is_local=self._is_local)
            self._mark_as_asking(connection)
            kind, body = self._render(accepted)
        except _Refused as refused:
            status, body = refused.status, f"{refused.text}\n".encode()
        except h11.RemoteProtocolError as exc:
            status, body = exc.error_status_hint, b"not valid HTTP/1.1\n"
        headers = [("Content-Type", kind), ("Content-Length", str(len(body))), ("Connection", "close")]
        _send(connection, http.send(h11.Response(status_code=status, headers=headers)) or b"", body)


def _listen(address: ListenAddress) -> socket.socket:
    """Raises OSError."""
    if address.path:
        return _listen_unix(address.path)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family, backlog=_CONNECTIONS)


def _listen_unix(path: str) -> socket.socket:
    """Replaces a socket that nobody listens on."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        else:
            raise OSError(f"another process listens on {path}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_CONNECTIONS)
    except BaseException:
        listener.close()
        raise
    return listener


def _read_request(http: h11.Connection, connection: socket.socket, *, is_local: bool) -> str:
    """Reads the request and returns its Accept header. Raises _Refused, RemoteProtocolError, OSError."""
    until = time.monotonic() + _REQUEST
    while (event := http.next_event()) is h11.NEED_DATA:
        connection.settimeout(max(0.001, until - time.monotonic()))
        data = connection.recv(_HEAD)
        if not data:
            raise ConnectionResetError
        http.receive_data(data)
    if not isinstance(event, h11.Request):
        raise ConnectionResetError
    if event.method != b"GET":
        raise _Refused(405, "only GET is allowed")
    if event.target.partition(b"?")[0] != b"/metrics":
        raise _Refused(404, "only /metrics exists")
    host = next((value.decode("latin-1") for name, value in event.headers if name == b"host"), "localhost")
    if is_local and not _is_address_or_localhost(host):
        raise _Refused(421, "use an IP address or localhost in the URL")
    return next((value.decode("latin-1") for name, value in event.headers if name == b"accept"), "")


def _is_address_or_localhost(host: str) -> bool:
    """Whether `host` is an IP address or localhost. A web page in a browser on this machine could point any other name to the
    loopback address, and then read the answers (DNS rebinding)."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() == "localhost":
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return True
    return False


def _send(connection: socket.socket, *parts: bytes) -> None:
    until = time.monotonic() + _ANSWER
    for part in parts:
        rest = memoryview(part)
        while rest:
            connection.settimeout(max(0.001, until - time.monotonic()))
            rest = rest[connection.send(rest[:_PIECE]) :]
