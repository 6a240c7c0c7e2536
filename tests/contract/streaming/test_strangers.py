"""Every local process can reach the port, but a client without a token can do nothing."""

from __future__ import annotations

import re
import socket
import urllib.parse

import pytest
from fakes.spdy import SECONDS, connected, dialled, head_of, spdy

from virtshim.model.errors import ResourceExhausted, WrongState
from virtshim.streaming.connection import MAX_UNAUTHENTICATED
from virtshim.streaming.server import StreamingServer


def answer(sock: socket.socket) -> tuple[int, str]:
    """Status and full text of a response that closes the connection."""
    text = b""
    while received := sock.recv(1 << 16):
        text += received
    return int(text.split()[1]), text.decode()


def test_a_url_serves_once(node):
    url = node.exec()
    spdy(url)
    _, head = connected(url, "v4.channel.k8s.io")
    assert head.startswith("HTTP/1.1 404 ")


def test_a_failed_attempt_invalidates_the_url(node):
    url = node.exec()
    _, head = connected(url, "v99.channel.k8s.io")
    assert head.startswith("HTTP/1.1 403 ")
    _, head = connected(url, "v4.channel.k8s.io")
    assert head.startswith("HTTP/1.1 404 ")


def test_a_url_lives_a_minute(node):
    url = node.exec()
    node.clock.advance(60.1)
    _, head = connected(url, "v4.channel.k8s.io")
    assert head.startswith("HTTP/1.1 404 ")


def test_a_token_serves_only_its_own_kind_of_request(node):
    url = node.exec()
    _, head = connected(url.replace("/exec/", "/attach/"), "v4.channel.k8s.io")
    assert head.startswith("HTTP/1.1 404 ")


@pytest.mark.parametrize(
    "path", ["/", "/exec/", "/exec/AAAAAAAAAAAAAAAAAAAAAA", "/exec", "//", "/../etc/passwd", "/x/y/z"]
)
def test_a_guessed_token_gets_404_and_nothing_else(node, path):
    base = node.exec().partition("/exec/")[0]
    sock, _ = dialled(base + "/")
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n".encode())
    status, text = answer(sock)
    assert status == 404
    assert text.endswith("\r\n\r\nnot found\n")


def test_the_query_string_changes_nothing(node):
    spdy(node.exec("cat") + "?command=sh&container=other")
    assert node.sessions.requests == [] or node.sessions.requests[0].command == ("cat",)


def test_tokens_are_128_random_bits_on_loopback(node):
    urls = {node.exec() for _ in range(100)}
    assert len(urls) == 100
    for url in urls:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/exec/[A-Za-z0-9_-]{22}", url)


def test_a_pod_may_have_100_unused_urls(node):
    for _ in range(100):
        node.exec()
    with pytest.raises(ResourceExhausted, match="100 streaming URLs"):
        node.exec()
    node.clock.advance(61)
    node.exec()


def test_a_request_from_a_web_page_needs_a_token(node):
    url = node.exec()
    wrong = url.rpartition("/")[0] + "/" + "A" * 22
    for path, status in ((wrong, "404"), (url, "101")):  # clients in Python and web consoles send it too
        _, head = connected(path, "v4.channel.k8s.io", headers="Origin: https://page.example\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ")
        assert "access-control" not in head.lower()


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "CONNECT", "HEAD", "BREW"])
def test_other_methods_are_refused(node, method):
    sock, path = dialled(node.exec())
    sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert head_of(sock).startswith("HTTP/1.1 405 ")


def test_a_plain_get_is_refused_because_it_must_upgrade(node):
    sock, path = dialled(node.exec())
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    status, text = answer(sock)
    assert status == 400
    assert "upgraded" in text


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nBad Name: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
    ],
)
def test_a_request_that_is_not_http_is_a_client_error(node, request_bytes):
    sock, _ = dialled(node.exec())
    sock.sendall(request_bytes)
    status, _ = answer(sock)
    assert 400 <= status < 506
    spdy(node.exec())


def test_a_head_of_more_than_16_kib_is_refused(node):
    sock, path = dialled(node.exec())
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n".encode() + b"X-Pad: " + b"y" * 20_000)
    status, _ = answer(sock)
    assert status == 431


def test_a_slow_client_is_disconnected(make_node):
    node = make_node(handshake=0.3)
    sock, path = dialled(node.exec())
    sock.sendall(f"GET {path} HTTP/1.1\r\nHo".encode())
    assert sock.recv(1) == b""


def test_slow_clients_never_keep_others_out(node):
    url = node.exec()
    dawdlers = [dialled(url)[0] for _ in range(MAX_UNAUTHENTICATED + 20)]
    for sock in dawdlers:
        sock.sendall(b"GET / HT")
    spdy(url)
    assert dawdlers[0].recv(1) == b"", "the oldest had to make room"


def test_an_idle_session_ends(make_node):
    node = make_node(idle=0.3)
    client = spdy(node.exec())
    client.to_the_end()
    assert client.closed


def test_a_body_is_refused(node):
    _, head = connected(node.exec(), "v4.channel.k8s.io", headers="Content-Length: 3\r\n")
    assert head.startswith("HTTP/1.1 400 ")


def test_bytes_behind_the_request_belong_to_the_new_protocol(node):
    sock, path = dialled(node.exec(stdout=True))
    ping = b"\x80\x03\x00\x06\x00\x00\x00\x04\x00\x00\x00\x09"
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n".encode() + ping)
    assert head_of(sock).startswith("HTTP/1.1 101 ")
    assert sock.recv(100) == ping


def test_a_port_in_use_is_reported_with_the_remedy(node):
    taken = urllib.parse.urlsplit(node.exec()).port
    with pytest.raises(WrongState, match=r"streaming\.port"):
        StreamingServer("127.0.0.1", taken, node.clock).start(node.sessions, node.sessions, node.screens)


def test_an_ipv6_loopback_is_served_too(node):
    server = StreamingServer("::1", 0, node.clock)
    server.start(node.sessions, node.sessions, node.screens)
    try:
        url = server.offer(node.request())
        assert url.startswith("http://[::1]:")
        port = urllib.parse.urlsplit(url).port
        socket.create_connection(("::1", port), SECONDS).close()
    finally:
        server.stop()
