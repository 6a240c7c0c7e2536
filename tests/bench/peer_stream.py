"""Measures a file from node to node beside the same file over plain TCP, from memory to nowhere, in the same chunks, on
loopback. Sender and receiver are separate processes, as on two nodes. Connections and handshakes are made before.

python -m tests.bench.peer_stream [ROUNDS]     these figures alone"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
    sys.path[:0] = [str(PROJECT), str(PROJECT / "tests"), str(PROJECT / "tests" / "bench")]

from fakes.node_certificates import ClusterCa  # noqa: E402  needs the path above
from figures import Figures  # noqa: E402

from virtshim.peers.certificates import PeerFiles  # noqa: E402
from virtshim.peers.client import PeerClient  # noqa: E402
from virtshim.peers.ports import PeerLink  # noqa: E402
from virtshim.peers.server import PeerServer  # noqa: E402
from virtshim.system.live import Live  # noqa: E402

_SIZE, _CHUNK = 1 << 30, 1 << 20
_LIMIT = 60.0


def peer_stream_rounds(rounds: int, figures: Figures) -> None:
    """The order alternates from round to round."""
    with tempfile.TemporaryDirectory() as directory, _file() as source:
        ca = ClusterCa(Path(directory))
        one, two = ca.node("one"), ca.node("two")
        ways: list[Callable[[], float]] = [lambda: _ours(one, two, source), lambda: _plain(source)]
        for number in range(1, rounds + 1):
            first = number % 2
            found = {at: ways[at]() for at in (first, 1 - first)}
            figures.add("stream_mib_per_s", found[0], "MiB/s")
            figures.add("plain_tcp_mib_per_s", found[1], "MiB/s")
            figures.add("stream_ratio", found[0] / found[1], "ratio")


@contextlib.contextmanager
def _file() -> Iterator[int]:
    descriptor = os.memfd_create("stream")
    try:
        for _ in range(_SIZE // _CHUNK):
            os.write(descriptor, os.urandom(_CHUNK))
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _receiver(receive: Callable[..., None], *arguments: object) -> Iterator[int]:
    """A process that receives once. Its port."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=receive, args=(there, *arguments))
    process.start()
    try:
        assert here.poll(_LIMIT), "the receiver has not started"
        yield here.recv()
        process.join(_LIMIT)
    finally:
        process.kill()
        process.join()


def _mib_per_second(source: int, send: Callable[[], object]) -> float:
    os.lseek(source, 0, os.SEEK_SET)
    began = time.monotonic()
    send()
    return _SIZE / (1 << 20) / (time.monotonic() - began)


def _ours(one: PeerFiles, two: PeerFiles, source: int) -> float:
    def send() -> None:
        link.send_file(source, _LIMIT)
        assert link.receive(_LIMIT) == {"got": _SIZE}

    with _receiver(_receive_ours, two) as port, _connected(one, port) as link:
        return _mib_per_second(source, send)


def _connected(one: PeerFiles, port: int) -> AbstractContextManager[PeerLink]:
    return PeerClient(one, Live({"two": f"127.0.0.1:{port}"})).connect("two", _LIMIT)


def _receive_ours(told: Connection, files: PeerFiles) -> None:
    is_over = threading.Event()

    def handle(link: PeerLink) -> None:
        with open(os.devnull, "wb") as sink:
            link.send({"got": link.receive_file(sink.fileno(), _SIZE, _LIMIT)}, _LIMIT)
        is_over.set()

    server = PeerServer("127.0.0.1:0", files, handle)
    server.start()
    told.send(server.port)
    assert is_over.wait(_LIMIT)
    server.close()


def _plain(source: int) -> float:
    def send() -> None:
        content = memoryview(bytearray(_CHUNK))
        while count := os.readv(source, [content]):
            link.sendall(content[:count])
        assert link.recv(1) == b"."

    with _receiver(_receive_plain) as port, socket.create_connection(("127.0.0.1", port), timeout=_LIMIT) as link:
        return _mib_per_second(source, send)


def _receive_plain(told: Connection) -> None:
    content, left = memoryview(bytearray(_CHUNK)), _SIZE
    with socket.create_server(("127.0.0.1", 0)) as listener, open(os.devnull, "wb") as sink:
        told.send(listener.getsockname()[1])
        link, _ = listener.accept()
        with link:
            while left:
                count = link.recv_into(content)
                assert count
                os.write(sink.fileno(), content[:count])
                left -= count
            link.sendall(b".")


if __name__ == "__main__":
    figures = Figures()
    peer_stream_rounds(int(sys.argv[1]) if len(sys.argv) > 1 else 5, figures)
    figures.tell()
