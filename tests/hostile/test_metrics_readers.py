"""Clients that may not read a node's metrics cannot, and no client can keep Prometheus from reading them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from virtshim.metrics.metrics_server import MetricsServer

pytestmark = pytest.mark.hostile

PODS = b'virtshim_vm{pod="secret"} 1\n'
# More than a socket's buffers hold.
MUCH = PODS * 2_000_000


# Clients that are served, and those that had to make room while their answer was being made.
MOST_AT_ONCE = 16


@contextlib.contextmanager
def serving(address: str, body: bytes = PODS, render: Callable[[], None] = lambda: None) -> Iterator[MetricsServer]:
    def rendered(_: str) -> tuple[str, bytes]:
        render()
        return "text/plain", body

    server = MetricsServer(address, rendered)
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
def test_a_web_page_with_a_name_for_loopback_cannot_read_pod_names(host: str) -> None:
    with serving("127.0.0.1:0") as server:
        answer = asked("127.0.0.1", server.port, host)
    assert answer.startswith(b"HTTP/1.1 421")
    assert b"secret" not in answer


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:10011", "localhost:10011", "LOCALHOST", "[::1]:1", "[::1]"])
def test_a_request_by_ip_address_can_read_metrics(host: str) -> None:
    with serving("127.0.0.1:0") as server:
        assert PODS in asked("127.0.0.1", server.port, host)


def test_host_names_are_allowed_on_a_network_address() -> None:
    with serving("0.0.0.0:0") as server:
        assert PODS in asked("127.0.0.1", server.port, "node.example:10011")


@pytest.mark.parametrize("words", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_holding_all_connections_does_not_block_prometheus(words: bytes) -> None:
    """The last client sends a request and does not read the answer."""
    with serving("127.0.0.1:0", MUCH) as server, contextlib.ExitStack() as held:
        for _ in range(20):
            one = held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            one.sendall(words)
        assert asked("127.0.0.1", server.port, "localhost").endswith(PODS)


def test_repeated_requests_compute_few_answers_at_once() -> None:
    """A node's metrics take a while. A client that was dropped for others has already requested them."""
    changed, at_once, may_end = threading.Condition(), 0, False

    def render() -> None:
        nonlocal at_once
        with changed:
            at_once += 1
            changed.notify_all()
            changed.wait_for(lambda: may_end, 60)
            at_once -= 1

    def end() -> None:
        nonlocal may_end
        with changed:
            may_end = True
            changed.notify_all()

    def ask(timeout: float) -> None:
        one = held.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout))
        one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")

    with serving("127.0.0.1:0", render=render) as server, contextlib.ExitStack() as held:
        held.callback(end)
        for asked_before in range(MOST_AT_ONCE):
            ask(timeout=60)
            with changed:
                assert changed.wait_for(lambda: at_once > asked_before, 60)  # noqa: B023
        for _ in range(MOST_AT_ONCE):
            with contextlib.suppress(TimeoutError):  # the kernel lets nobody in any more
                ask(timeout=0.05)
        with changed:
            assert not changed.wait_for(lambda: at_once > MOST_AT_ONCE, 1)
        end()
        assert asked("127.0.0.1", server.port, "localhost").endswith(PODS)
