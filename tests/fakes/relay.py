"""A relay between a client and a server on loopback, which can stop after a number of bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Relay:
    """`hold_after`: passes that many bytes of answers in total, then none until it is None again. `held` tells whether
    it holds."""

    def __init__(self, server: str) -> None:
        host, _, port = server.partition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._passed = 0
        self._sockets: list[socket.socket] = []
        self.hold_after: int | None = None
        self.held = threading.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                for source, target, counts in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=(source, target, counts), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _pump(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counts and not self._may_pass(len(data)):
                    self.held.set()
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _may_pass(self, size: int) -> bool:
        with self._lock:
            self._passed += size
            return self.hold_after is None or self._passed <= self.hold_after


@contextlib.contextmanager
def relaying(server: str) -> Iterator[Relay]:
    relay = Relay(server)
    thread = threading.Thread(target=relay.serve)
    thread.start()
    try:
        yield relay
    finally:
        relay.close()
        thread.join()
