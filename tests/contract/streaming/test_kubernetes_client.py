"""The Kubernetes project's own Python client works with the streaming server."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.podservice import closed_port, listening
from fakes.sessions import FakeSession
from kubernetes.client import Configuration
from kubernetes.stream.ws_client import PortForward, WSClient, create_websocket

# The client leaves sockets for the garbage collector to close.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

STDIN = 0


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("Kubernetes port forward proxy"):
            thread.join(10)
            assert not thread.is_alive()
    gc.collect()


def client(url: str, protocol: str = "", *, binary: bool = False) -> WSClient:
    """Offers v5 and v4 unless a protocol is named."""
    headers = {"sec-websocket-protocol": protocol} if protocol else {}
    return WSClient(Configuration(), url.replace("http", "ws", 1), headers, capture_all=True, binary=binary)


async def tally(session: FakeSession) -> int:
    """Echoes its input to both streams, and ends with a code of its own when that ends."""
    while data := await session.stdin.get():
        await session.out(data)
        await session.err(str(len(data)).encode())
    return 7


def test_input_output_and_exit_code_pass_with_the_clients_protocols(node):
    node.sessions.script = tally
    ws = client(node.exec(stdin=True, stdout=True, stderr=True))
    assert ws.subprotocol == "v5.channel.k8s.io"
    ws.write_stdin("grüße\n")
    assert ws.readline_stdout(timeout=10) == "grüße"
    ws.close_channel(STDIN)
    ws.run_forever(timeout=10)
    assert ws.returncode == 7
    assert ws.read_stderr() == "8"


def test_the_older_protocol_reports_exit_codes(node):
    async def three(session: FakeSession) -> int:
        await session.out(b"out")
        return 3

    node.sessions.script = three
    ws = client(node.exec(stdout=True), "v4.channel.k8s.io")
    ws.run_forever(timeout=10)
    assert (ws.subprotocol, ws.returncode, ws.read_all()) == ("v4.channel.k8s.io", 3, "out")


def test_success_is_exit_code_0(node):
    async def good(session: FakeSession) -> int:
        return 0

    node.sessions.script = good
    ws = client(node.exec(stdout=True))
    ws.run_forever(timeout=10)
    assert ws.returncode == 0


def test_megabytes_pass_both_ways_unchanged(node):
    ws = client(node.exec(stdin=True, stdout=True), binary=True)  # echoes
    sent = os.urandom(3 << 20)
    back = b""
    for start in range(0, len(sent), 1 << 16):
        ws.write_stdin(sent[start : start + (1 << 16)])
        back += ws.read_stdout(timeout=0)
    ws.close_channel(STDIN)
    ws.run_forever(timeout=20)
    back += ws.read_stdout()
    assert hashlib.sha256(back).digest() == hashlib.sha256(sent).digest()
    assert ws.returncode == 0


def test_a_terminal_is_resized(node):
    async def wait_for_size(session: FakeSession) -> int:
        await session.out("{}x{}".format(*await session.sizes.get()).encode())
        return 0

    node.sessions.script = wait_for_size
    ws = client(node.exec(stdin=True, stdout=True, tty=True))
    ws.write_channel(4, json.dumps({"Width": 120, "Height": 40}))
    ws.run_forever(timeout=10)
    assert ws.read_all() == "120x40"


@pytest.fixture
def forward(node) -> Iterator[Callable[..., PortForward]]:
    made: list[tuple[PortForward, tuple[int, ...]]] = []

    def connect(*ports: int) -> PortForward:
        headers = {"sec-websocket-protocol": "v4.channel.k8s.io"}
        websocket = create_websocket(Configuration(), node.forward(*ports).replace("http", "ws", 1), headers)
        made.append((PortForward(websocket, ports), ports))
        return made[-1][0]

    yield connect
    for joined, ports in made:
        for port in ports:
            joined.socket(port).close()
            joined.local_ports[port].python.close()
        joined.websocket.close()


def received(sock: Any) -> bytes:
    sock.settimeout(10)
    whole = b""
    while data := sock.recv(1 << 16):
        whole += data
    return whole


def test_ports_are_forwarded_side_by_side(forward):
    def shout(connection: Any) -> None:
        connection.sendall(connection.recv(100).upper())

    with listening(shout) as one, listening(shout) as two:
        joined = forward(one, two)
        for port, word in ((one, b"first"), (two, b"second")):
            joined.socket(port).sendall(word)
        answers = [joined.socket(port).recv(100) for port in (one, two)]
        assert answers == [b"FIRST", b"SECOND"]


def test_megabytes_are_forwarded_unchanged(forward):
    payload = os.urandom(4 << 20)
    with listening(lambda connection: connection.sendall(payload)) as port:
        joined = forward(port)
        assert received(joined.socket(port)) == payload


def test_a_closed_port_is_reported(forward):
    port = closed_port()
    joined = forward(port)
    assert received(joined.socket(port)) == b""
    assert "refused" in joined.error(port)
