"""Sends packets between namespaces, and sees which ones arrive, which are answered, and which a policy drops. Sockets
are created inside the namespaces and used from here."""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import Self

from tapmanager.links import netns

_LIMIT = 60.0
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Place:
    """`path`: of its network namespace, "" for the host's. `addresses`: by network and family ("0/4"); `mtu`: of them all."""

    name: str
    path: str
    addresses: Mapping[str, str]
    mtu: int = 1500

    def socket(self, address: str, kind: socket.SocketKind) -> socket.socket:
        def make() -> socket.socket:
            made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
            made.settimeout(1.0)
            return made

        return netns.run_inside(self.path, make) if self.path else make()

    def pings(self, target: str) -> bool:
        inside = ["ip", "netns", "exec", PurePath(self.path).name] if self.path else []
        words = [*inside, "ping", "-c", "1", "-W", "1", target]
        return subprocess.run(words, capture_output=True, check=False, timeout=60).returncode == 0


@dataclass
class Echoes:
    """Echo servers at all addresses of all places, by TCP and UDP; they keep the datagrams that they received. Use as a
    context manager."""

    places: Sequence[Place]
    port: int = 0
    """Of all sockets; 0 for any."""
    ports: dict[tuple[str, int], int] = field(default_factory=dict)
    """By address and kind of socket."""
    got: list[bytes] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._selector = selectors.DefaultSelector()
        self._stop_read, self._stop_write = socket.socketpair()
        self._selector.register(self._stop_read, selectors.EVENT_READ)
        self._open: list[socket.socket] = [self._stop_read, self._stop_write]
        for place in self.places:
            for address in place.addresses.values():
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    self._listen(place, address, kind)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_write.send(b".")
        self._thread.join()
        self._selector.close()
        for one in self._open:
            one.close()

    def answer(self, sender: Place, address: str, kind: socket.SocketKind, data: bytes) -> bool:
        """The same as `answers`, for one of the places."""
        return answers(sender, address, self.ports[address, kind], kind, data)

    def _listen(self, place: Place, address: str, kind: socket.SocketKind) -> None:
        made = place.socket(address, kind)
        self._open.append(made)
        made.bind((address, self.port))
        made.setblocking(False)
        if kind is socket.SOCK_STREAM:
            made.listen()
        self.ports[address, kind] = made.getsockname()[1]
        self._selector.register(made, selectors.EVENT_READ, kind)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stop_read:
                    return
                with contextlib.suppress(OSError):  # of who has gone away
                    self._serve(key)

    def _serve(self, key: selectors.SelectorKey) -> None:
        sock = key.fileobj
        assert isinstance(sock, socket.socket)
        if key.data is socket.SOCK_DGRAM:
            data, sender = sock.recvfrom(70_000)
            self.got.append(data)
            sock.sendto(data, sender)
        elif key.data is socket.SOCK_STREAM:
            accepted, _ = sock.accept()
            accepted.settimeout(_LIMIT)
            self._open.append(accepted)
            self._selector.register(accepted, selectors.EVENT_READ, None)
        else:
            data = b""
            try:
                data = sock.recv(70_000)
                sock.sendall(data)
            finally:
                if not data:
                    self._selector.unregister(sock)
                    sock.shutdown(socket.SHUT_WR)


def first_that_fails(echoes: Echoes, pairs: Sequence[tuple[Place, Place]]) -> str:
    """The first kind of packet that fails to pass and return, over all networks and families that both places have; ""
    if none."""
    for sender, target in pairs:
        for key in sorted(sender.addresses.keys() & target.addresses.keys()):
            address, mtu = target.addresses[key], max(sender.mtu, target.mtu)
            more_than_a_window, fragments = bytes(range(256)) * 600, b"f" * (3 * mtu + 123)
            checks = {
                "ping": partial(sender.pings, address),
                "tcp": partial(echoes.answer, sender, address, socket.SOCK_STREAM, more_than_a_window),
                "udp": partial(echoes.answer, sender, address, socket.SOCK_DGRAM, b"x" * 100),
                "fragments": partial(echoes.answer, sender, address, socket.SOCK_DGRAM, fragments),
            }
            for kind, check in checks.items():
                if not within(check):
                    return f"{kind} from {sender.name} to {target.name} ({address})"
    return ""


def within(check: Callable[[], bool]) -> bool:
    """Whether the condition holds in the end; each try waits by itself."""
    until = time.monotonic() + _LIMIT
    while not (done := check()) and time.monotonic() < until:
        pass
    return done


def answers(sender: Place, address: str, port: int, kind: socket.SocketKind, data: bytes) -> bool:
    """Whether a sent message comes back, within one or ten seconds."""
    with sender.socket(address, kind) as client, contextlib.suppress(OSError):
        client.connect((address, port))
        if kind is socket.SOCK_STREAM:
            client.settimeout(10.0)
            return _all_of(client, data) == data
        data = b"%08d" % next(_numbers) + data
        client.send(data)
        return client.recv(70_000) == data
    return False


def _all_of(client: socket.socket, data: bytes) -> bytes:
    received = bytearray()
    writer = threading.Thread(target=_write, args=(client, data))
    writer.start()
    try:
        while piece := client.recv(70_000):
            received += piece
    finally:
        client.close()
        writer.join()
    return bytes(received)


def _write(client: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)


def comes_through(echoes: Echoes, sender: Place, address: str, port: int) -> bool:
    """Whether datagrams from that port, which a policy matches, arrive; a datagram that surely passes is sent after
    them."""
    words = b"policy%08d" % next(_numbers)
    with sender.socket(address, socket.SOCK_DGRAM) as client:
        client.bind(("", port))
        for _ in range(3):
            with contextlib.suppress(PermissionError):  # the hook for packets that leave the sender's own machine
                client.sendto(words, (address, echoes.ports[address, socket.SOCK_DGRAM]))
    after = partial(echoes.answer, sender, address, socket.SOCK_DGRAM, b"after")
    assert within(after), f"nothing at all comes from {sender.name} to {address}"
    return words in echoes.got


@contextlib.contextmanager
def rule(words: str, where: str, table: str = "vst-policy") -> Iterator[None]:
    """A rule on the node. `where`: a table's family and the hook, "inet forward"."""
    family, hook = where.split(" ", 1)
    _nft(f"table {family} {table} {{\n chain c {{\n type filter hook {hook} priority 0;\n {words}\n }}\n }}")
    try:
        yield
    finally:
        _nft(f"delete table {family} {table}")


def _nft(text: str) -> None:
    done = subprocess.run(["nft", "-f", "-"], input=text, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, (text, done.stderr)
