"""Who may not read a node's metrics, and who would keep Prometheus from reading them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from virtshim.telemetry.metrics_server import MetricsServer

pytestmark = pytest.mark.hostile

PODS = b'virtshim_vm{pod="secret"} 1\n'
# More than a socket's buffers hold.
MUCH = PODS * 2_000_000


@contextlib.contextmanager
def serving(address: str, body: bytes = PODS) -> Iterator[MetricsServer]:
    server = MetricsServer(address, lambda _: ("text/plain", body))
    server.start()
    try:
        yield server
    finally:
        server.stop()


def asked(address: str, port: int, host: str) -> bytes:
    with socket.create_connection((address, port), timeout=30) as one:
        one.sendall(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        with one.makefile("rb") as answer:
            return answer.read()


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:10011",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "[evil]",
        "",
        "1.2.3",
        "node",
    ],
)
def test_a_page_whose_name_leads_to_loopback_reads_no_pods_name(host: str) -> None:
    with serving("127.0.0.1:0") as server:
        answer = asked("127.0.0.1", server.port, host)
    assert answer.startswith(b"HTTP/1.1 421")
    assert b"secret" not in answer


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:10011", "localhost:10011", "LOCALHOST", "[::1]:1", "[::1]"])
def test_who_asks_by_an_address_reads_them(host: str) -> None:
    with serving("127.0.0.1:0") as server:
        assert PODS in asked("127.0.0.1", server.port, host)


def test_at_an_address_of_the_network_names_are_right() -> None:
    with serving("0.0.0.0:0") as server:
        assert PODS in asked("127.0.0.1", server.port, "node.example:10011")


@pytest.mark.parametrize("words", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_who_holds_all_connections_keeps_prometheus_from_none(words: bytes) -> None:
    """The last one asks, and does not read."""
    with serving("127.0.0.1:0", MUCH) as server, contextlib.ExitStack() as held:
        for _ in range(20):
            one = held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            one.sendall(words)
        assert asked("127.0.0.1", server.port, "localhost").endswith(PODS)
