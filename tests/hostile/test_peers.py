"""At the port where nodes serve each other, strangers and taken-over nodes are refused. No thread is left, and other
nodes are served meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.node_certificates import SERVER, ClusterCa
from fakes.waiting import eventually
from structlog.testing import capture_logs

from virtshim.model.errors import (
    InternalError,
    InvalidRequest,
    PermissionRefused,
    ResourceExhausted,
    ShimError,
    Unavailable,
)
from virtshim.peers.certificates import PeerFiles
from virtshim.peers.client import PeerClient
from virtshim.peers.ports import PeerLink
from virtshim.peers.server import PeerServer
from virtshim.system.live import Live

pytestmark = pytest.mark.hostile

WAIT = 30.0
# The places of all nodes and of each node, and here the seconds of a handshake that never ends.
ALL, EACH, HANDSHAKE = 24, 6, 3.0
TLS_1_2, TLS_1_3 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
# A chunk of a ClientHello.
BEGUN = bytes.fromhex("160301020001")


def echo(link: PeerLink) -> None:
    while True:
        link.send(link.receive(WAIT), WAIT)


class Node:
    """Node `victim`, which serves others, and the CA that gives everybody a certificate."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.ca = ClusterCa(directory)
        self._files = self.ca.node("victim")
        self._stack = stack
        self.port = 0

    def serve(self, handle: Callable[[PeerLink], None] = echo, **limits: float) -> None:
        server = PeerServer("127.0.0.1:0", self._files, handle, **limits)
        server.start()
        self._stack.callback(server.close)
        self.port = server.port

    def client(self, name: str = "honest") -> PeerClient:
        return PeerClient(self.ca.node(name), Live({"victim": f"127.0.0.1:{self.port}"}))

    def serves_others(self) -> bool:
        with self.client().connect("victim", WAIT) as link:
            link.send({"are": "you there"}, WAIT)
            return link.receive(WAIT) == {"are": "you there"}

    def tcp(self) -> socket.socket:
        return self._stack.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=WAIT))

    def tls(self, files: PeerFiles | None, version: ssl.TLSVersion = TLS_1_3) -> ssl.SSLSocket:
        """A client that checks nothing and knows no frames."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = context.maximum_version = version
        if files:
            context.load_cert_chain(files.certificate, files.key)
        return self._stack.enter_context(context.wrap_socket(self.tcp()))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with contextlib.ExitStack() as stack:
        yield Node(tmp_path, stack)
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "peer"])


def frame(kind: bytes, content: bytes) -> bytes:
    return struct.pack("!cI", kind, len(content)) + content


def read_frame(taken_over: socket.socket) -> tuple[bytes, Any]:
    with taken_over.makefile("rb") as file:
        kind, size = struct.unpack("!cI", file.read(5))
        return kind, json.loads(file.read(size))


def is_ended(connection: socket.socket) -> bool:
    connection.settimeout(WAIT)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


STRANGERS: dict[str, tuple[Callable[[Node, Path], object], str]] = {
    "HTTP": (lambda node, _: node.tcp().sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), "http request"),
    "noise": (lambda node, _: node.tcp().sendall(os.urandom(4096).replace(b"\x16", b"\0")), ""),
    "nothing": (lambda node, _: node.tcp().close(), ""),
    "TLS 1.2": (lambda node, _: node.tls(node.ca.node("honest"), TLS_1_2), "unsupported protocol"),
    "no certificate": (lambda node, _: node.tls(None), "peer did not return a certificate"),
    "expired": (lambda node, _: node.tls(node.ca.node("honest", lasts=-1)), "certificate has expired"),
    "another CA": (lambda node, path: node.tls(ClusterCa(path).node("honest")), "self-signed|unable to get local issuer"),
    "for servers alone": (lambda node, _: node.tls(node.ca.node("honest", usages=[SERVER])), "unsuitable certificate purpose"),
    "no name": (lambda node, _: node.tls(node.ca.node()), "must have one DNS name"),
    "two names": (lambda node, _: node.tls(node.ca.node("honest", "other")), "must have one DNS name"),
    "any name": (lambda node, _: node.tls(node.ca.node("*")), "must have one DNS name"),
}  # fmt: skip


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_reaches_no_operation_and_the_log_says_why(node: Node, tmp_path: Path, who: str) -> None:
    reached = threading.Event()

    def handle(link: PeerLink) -> None:
        if link.peer != "after":
            reached.set()

    node.serve(handle)
    attempt, why = STRANGERS[who]
    with capture_logs() as logs:
        with contextlib.suppress(OSError):
            attempt(node, tmp_path)
        eventually(lambda: bool([one for one in logs if one["event"] in ("peers.refused", "peers.dropped")]))
    (told,) = [one for one in logs if one["event"] in ("peers.refused", "peers.dropped")]
    assert (told["host"], told["log_level"]) == ("127.0.0.1", "warning")
    assert any(part in told["error"] for part in why.split("|")), told
    with node.client("after").connect("victim", WAIT):
        assert not reached.is_set()


@pytest.mark.parametrize("begun", [b"", BEGUN])
def test_whoever_holds_handshakes_is_cut_and_keeps_no_node_out(node: Node, begun: bytes) -> None:
    node.serve(handshake=HANDSHAKE)
    began, held = time.monotonic(), []
    for _ in range(5):
        # Fewer than the kernel's queue has places for: it would forget some whose clients do not know.
        for _ in range(12):
            held.append(node.tcp())
            with contextlib.suppress(OSError):
                held[-1].sendall(begun)
        assert node.serves_others()
    assert time.monotonic() - began < HANDSHAKE
    assert all(is_ended(one) for one in held)
    assert time.monotonic() - began < 2 * HANDSHAKE


def test_a_handshake_that_trickles_is_cut_at_the_same_time(node: Node) -> None:
    node.serve(handshake=HANDSHAKE)
    trickling, began = node.tcp(), time.monotonic()
    trickling.settimeout(0.2)
    with contextlib.suppress(ConnectionError):
        for byte in bytes.fromhex("1603013fff01003ffb0303") + bytes(1 << 14):
            trickling.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                if not trickling.recv(1):
                    break
    assert HANDSHAKE - 1 < time.monotonic() - began < HANDSHAKE + 2


def test_one_node_has_six_connections_and_leaves_the_others_theirs(node: Node) -> None:
    node.serve()
    with contextlib.ExitStack() as held:
        greedy = node.client("greedy")
        for _ in range(EACH):
            held.enter_context(greedy.connect("victim", WAIT))
        with pytest.raises(
            ResourceExhausted, match="node victim: peer greedy has 6 connections, the limit for one peer"
        ):
            held.enter_context(greedy.connect("victim", WAIT))
        assert node.serves_others()
    eventually(node.serves_others)


def test_many_nodes_together_leave_places_for_a_node_that_has_none(node: Node) -> None:
    node.serve()
    with contextlib.ExitStack() as held:
        for name in ("a", "b", "c"):
            client = node.client(name)
            for _ in range(EACH):
                held.enter_context(client.connect("victim", WAIT))
        late = node.client("late")
        held.enter_context(late.connect("victim", WAIT))
        with pytest.raises(ResourceExhausted, match="are kept for peers that have none"):
            held.enter_context(late.connect("victim", WAIT))
        assert node.serves_others()


FRAMES = {
    "too long": (struct.pack("!cI", b"M", (1 << 20) + 1), "a frame of 1048577 bytes"),
    "of 4 GiB": (struct.pack("!cI", b"M", (1 << 32) - 1), "a frame of 4294967295 bytes"),
    "a long error": (struct.pack("!cI", b"E", 1 << 20), "a frame of 1048576 bytes"),
    "of no kind": (frame(b"Q", b"{}"), "a frame of no known kind"),
    "HTTP inside": (b"GET / HTTP/1.1\r\n\r\n", "a frame of no known kind"),
    "no JSON": (frame(b"M", b"{"), "bad JSON"),
    "no UTF-8": (frame(b"M", b'{"a":"\xff"}'), "bad JSON"),
    "a key twice": (frame(b"M", b'{"do":"look","do":"move"}'), "bad JSON (a key is there twice)"),
    "a key twice inside": (frame(b"M", b'{"a":[{"b":1,"b":1}]}'), "bad JSON (a key is there twice)"),
    "no number": (frame(b"M", b'{"size":NaN}'), "bad JSON (NaN is not a number in JSON)"),
    "a long number": (frame(b"M", b'{"size":' + b"9" * 5000 + b"}"), "bad JSON"),
    "deep": (frame(b"M", b"[" * (1 << 20)), "bad JSON"),
    "a list": (frame(b"M", b"[]"), "JSON that is not an object"),
    "a chunk": (frame(b"C", b"x"), "data where a message should be"),
    "an end": (frame(b"Z", bytes(8)), "data where a message should be"),
    "an empty error": (frame(b"E", b"{}"), "an error without kind and text"),
    "an odd error": (frame(b"E", b'{"kind":["x"],"text":1}'), "an error without kind and text"),
}


@pytest.mark.parametrize("which", FRAMES)
def test_a_malformed_frame_is_refused_with_what_is_wrong_and_ends_the_connection(node: Node, which: str) -> None:
    node.serve()
    taken_over = node.tls(node.ca.node("evil"))
    sent, why = FRAMES[which]
    assert read_frame(taken_over) == (b"M", {"ready": True})
    taken_over.sendall(sent)
    kind, told = read_frame(taken_over)
    assert (kind, told["kind"]) == (b"E", "invalid")
    assert told["text"].startswith(f"node evil: sent {why}")
    assert is_ended(taken_over)
    assert node.serves_others()


@pytest.mark.parametrize("pause", [0.05, 0.0])
def test_a_message_that_trickles_has_the_time_of_one_message(node: Node, pause: float) -> None:
    """Also if there is always a byte more at the moment when the time is over."""
    ended: list[float] = []

    def handle(link: PeerLink) -> None:
        began = time.monotonic()
        with pytest.raises(Unavailable, match="node evil: is too slow"):
            link.receive(0.5)
        ended.append(time.monotonic() - began)

    node.serve(handle)
    taken_over = node.tls(node.ca.node("evil"))
    taken_over.settimeout(pause or WAIT)
    with contextlib.suppress(OSError):
        for byte in frame(b"M", bytes(1 << 20)):
            taken_over.sendall(bytes([byte]))
            if pause:
                with contextlib.suppress(TimeoutError):
                    taken_over.recv(1)
            if ended:
                break
    eventually(lambda: ended)
    assert ended[0] < 2


@pytest.mark.parametrize("sent", [b"", b"M", frame(b"M", b'{"a":1}')[:-1]])
def test_a_half_closed_connection_is_a_closed_one(node: Node, sent: bytes) -> None:
    node.serve()
    taken_over = node.tls(node.ca.node("evil"))
    taken_over.sendall(sent)
    with capture_logs() as logs:
        socket.socket.shutdown(taken_over, socket.SHUT_WR)
        assert is_ended(taken_over)
        eventually(lambda: bool(logs))
    assert [(one["event"], one["error"]) for one in logs] == [("peers.failed", "node evil: closed the connection")]


def test_a_node_that_reads_no_error_keeps_its_place_and_is_cut(node: Node) -> None:
    def handle(link: PeerLink) -> None:
        raise InvalidRequest("no")

    node.serve(handle)
    held = [node.tls(node.ca.node("evil")) for _ in range(3 * EACH)]
    with node.client().connect("victim", WAIT) as link, pytest.raises(InvalidRequest, match="node victim: no"):
        link.receive(WAIT)
    assert all(is_ended(one) for one in held)


FILES = {
    "an end too early": (frame(b"C", b"abc") + frame(b"Z", struct.pack("!Q", 4)), "an end mark that does not fit 3 bytes"),
    "a short end": (frame(b"Z", b"\0"), "an end mark that does not fit 0 bytes"),
    "more than agreed": (frame(b"C", bytes(1000)) + frame(b"C", b"x"), "a file of more than 1000 bytes"),
    "an empty chunk": (frame(b"C", b""), "a message or an empty chunk within a file"),
    "a message": (frame(b"C", b"x") + frame(b"M", b"{}"), "a message or an empty chunk within a file"),
    "a chunk too long": (struct.pack("!cI", b"C", (1 << 20) + 1), "a frame of 1048577 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("which", FILES)
def test_a_file_that_is_not_what_was_agreed_is_refused(node: Node, which: str) -> None:
    written: list[int] = []

    def handle(link: PeerLink) -> None:
        sink = os.memfd_create("sink")
        try:
            link.receive_file(sink, 1000, WAIT)
        finally:
            written.append(os.fstat(sink).st_size)
            os.close(sink)

    node.serve(handle)
    taken_over = node.tls(node.ca.node("evil"))
    sent, why = FILES[which]
    read_frame(taken_over)
    taken_over.sendall(sent)
    kind, told = read_frame(taken_over)
    assert (kind, told["kind"]) == (b"E", "invalid")
    assert f"node evil: sent {why}" in told["text"]
    assert written[0] <= 1000


# --- nodes that connect to something that is no node, or was taken over


@contextlib.contextmanager
def answering(how: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server on loopback, for one connection."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(WAIT)
                how(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
    thread.join(WAIT)


def as_server(files: PeerFiles, version: ssl.TLSVersion, *frames: bytes) -> Callable[[socket.socket], object]:
    def serve(connection: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = context.maximum_version = version
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(files.ca)
        context.load_cert_chain(files.certificate, files.key)
        with context.wrap_socket(connection, server_side=True) as secured:
            secured.sendall(b"".join(frames))
            is_ended(secured)

    return serve


READY = frame(b"M", b'{"ready":true}')


def connected(ca: ClusterCa, port: int, timeout: float = WAIT) -> ShimError:
    client = PeerClient(ca.node("honest"), Live({"evil": f"127.0.0.1:{port}"}))
    with pytest.raises(ShimError) as caught, client.connect("evil", timeout) as link:
        link.receive(timeout)
    return caught.value


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda one: one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "wrong version number"),
        (lambda one: one.close(), "cannot be reached"),
        (is_ended, "timed out"),
    ],
)
def test_what_speaks_no_tls_is_unavailable_in_time(
    tmp_path: Path, how: Callable[[socket.socket], object], words: str
) -> None:
    with answering(how) as port:
        told = connected(ClusterCa(tmp_path), port, 1.0)
    assert isinstance(told, Unavailable)
    assert words in str(told)


def test_a_server_below_tls_1_3_is_unavailable(tmp_path: Path) -> None:
    ca = ClusterCa(tmp_path)
    with answering(as_server(ca.node("evil"), TLS_1_2)) as port:
        told = connected(ca, port)
    assert isinstance(told, Unavailable)
    assert "tlsv1 alert protocol version" in str(told)


@pytest.mark.parametrize(
    ("certificate", "words"),
    [
        (lambda ca, _: ca.node("evil", lasts=-1), "certificate has expired"),
        (lambda _, path: ClusterCa(path).node("evil"), "is not valid"),
        (lambda ca, _: ca.node("other"), "names node other"),
        (lambda ca, _: ca.node("evil", "other"), "must have one DNS name"),
    ],
)
def test_a_server_with_another_certificate_is_told_nothing(
    tmp_path: Path, certificate: Callable[[ClusterCa, Path], PeerFiles], words: str
) -> None:
    ca = ClusterCa(tmp_path)
    with answering(as_server(certificate(ca, tmp_path), TLS_1_3, READY)) as port:
        told = connected(ca, port)
    assert isinstance(told, PermissionRefused)
    assert words in str(told)


@pytest.mark.parametrize(
    ("frames", "kind", "text"),
    [
        ([], Unavailable, "node evil: is too slow, or cannot be reached any more"),
        ([READY], Unavailable, "node evil: is too slow, or cannot be reached any more"),
        ([READY, frame(b"E", b'{"kind":"no such","text":"x"}')], InternalError, "node evil: x"),
        ([frame(b"E", b'{"kind":"aborted","text":"\\u001b[2J\\nroot:"}')], ShimError, r"node evil: \x1b[2J\nroot:"),
        ([READY, frame(b"E", json.dumps({"kind": "invalid", "text": "x" * 60000}).encode())], InvalidRequest, "characters)"),
    ],
)  # fmt: skip
def test_a_server_that_was_taken_over_makes_an_error_of_one_short_line(
    tmp_path: Path, frames: list[bytes], kind: type[ShimError], text: str
) -> None:
    ca = ClusterCa(tmp_path)
    with answering(as_server(ca.node("evil"), TLS_1_3, *frames)) as port:
        told = connected(ca, port, 1.0)
    assert isinstance(told, kind)
    assert str(told).endswith(text)
    assert str(told).isprintable()
    assert len(str(told)) < 9000
