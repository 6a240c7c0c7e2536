"""Connections to a pod's ports work over SPDY, over SPDY in a WebSocket, and over the WebSocket protocol of their
own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from fakes.podservice import closed_port, listening
from fakes.sessions import FakeSession
from fakes.spdy import SpdyClient, spdy
from fakes.streamnode import CONTAINER, SANDBOX
from fakes.ws import CLOSE, Tunnel, asked, websocket
from podclient import wait_until

from virtshim.cli.vnc import copy_both_ways
from virtshim.model.errors import Unavailable, WrongState
from virtshim.streaming.client import FORWARD, connect

PORTFORWARD = "portforward.k8s.io"
TUNNEL = "SPDY/3.1+portforward.k8s.io"


def upper(connection: socket.socket) -> None:
    """Answers in capitals after the client has closed its half; it works only with half-closes."""
    said = b""
    while received := connection.recv(1 << 16):
        said += received
    connection.sendall(said.upper())


def over_spdy(node) -> SpdyClient:
    return spdy(node.forward(), PORTFORWARD)


def over_tunnel(node) -> SpdyClient:
    return SpdyClient(Tunnel(websocket(node.forward(), TUNNEL)))


@pytest.fixture(params=[over_spdy, over_tunnel])
def client(request, node) -> SpdyClient:
    return request.param(node)


def pair(client: SpdyClient, port: int, request_id: str | None = "0") -> tuple[int, int]:
    """The error and data streams of one connection, as client-go opens them."""
    more = {} if request_id is None else {"requestid": request_id}
    error = client.open(streamtype="error", port=str(port), **more)
    client.write(error, b"", fin=True)
    return error, client.open(streamtype="data", port=str(port), **more)


def test_bytes_and_half_closes_pass_both_ways(client):
    with listening(upper) as port:
        error, data = pair(client, port)
        client.write(data, b"get ")
        client.write(data, b"this", fin=True)
        assert client.read_all(data) == b"GET THIS"
        assert client.read_all(error) == b""


def test_a_client_without_request_ids_is_supported(client):
    with listening(upper) as port:
        pairs = [pair(client, port, None) for _ in range(3)]
        for number, (_, data) in enumerate(pairs):
            client.write(data, f"old {number}".encode(), fin=True)
        for number, (_, data) in enumerate(pairs):
            assert client.read_all(data) == f"OLD {number}".encode()


def test_a_closed_port_is_reported_on_the_error_stream(client):
    port = closed_port()
    error, data = pair(client, port)
    message = client.read_all(error).decode()
    assert str(port) in message
    assert "refused" in message
    assert client.read_all(data) == b""


def test_many_connections_run_at_once_over_one_client(client):
    with listening(upper) as port:
        pairs = [pair(client, port, str(number)) for number in range(40)]
        for number, (_, data) in enumerate(pairs):
            client.write(data, f"connection {number}".encode(), fin=True)
        for number, (_, data) in reversed(list(enumerate(pairs))):
            assert client.read_all(data) == f"CONNECTION {number}".encode()


def test_megabytes_come_through_unchanged(client):
    payload = bytes(range(256)) * (4 << 12)
    with listening(lambda connection: connection.sendall(payload)) as port:
        _, data = pair(client, port)
        assert client.read_all(data) == payload


def test_the_streams_of_a_pair_may_come_in_any_order(client):
    with listening(upper) as port:
        data = client.open(streamtype="data", port=str(port), requestid="x")
        client.open(streamtype="error", port=str(port), requestid="x")
        client.write(data, b"later", fin=True)
        assert client.read_all(data) == b"LATER"


@pytest.mark.parametrize("port", ["0", "65536", "-1", "80x", "", "٨٠", "99999999999999999999"])
def test_an_invalid_port_is_refused(client, port):
    stream = client.open(streamtype="error", port=port, requestid="1")
    client.until(lambda: stream in client.reset)


def test_unknown_and_duplicate_stream_types_are_refused(client):
    wrong = [client.open(streamtype="udp", port="53", requestid="1"), client.open(port="53", requestid="2")]
    first = client.open(streamtype="error", port="53", requestid="3")
    wrong.append(client.open(streamtype="error", port="53", requestid="3"))
    wrong.append(client.open(streamtype="data", port="54", requestid="3"))
    client.until(lambda: client.reset.keys() == set(wrong))
    assert first in client.replied


def test_only_the_pods_address_is_dialed(client):
    """A header that names a host changes nothing."""
    with listening(upper) as port:
        client.open(streamtype="error", port=str(port), requestid="1", host="192.0.2.1", address="192.0.2.1")
        data = client.open(streamtype="data", port=str(port), requestid="1", host="192.0.2.1", address="192.0.2.1")
        client.write(data, b"here", fin=True)
        assert client.read_all(data) == b"HERE"


def test_a_reset_by_the_client_closes_the_connection_to_the_pod(client):
    closed = threading.Event()

    def wait(connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"hello")
            assert connection.recv(1) == b""
        closed.set()

    with listening(wait) as port:
        error, data = pair(client, port)
        client.until(lambda: client.received[data] == b"hello")
        client.send(b"\x80\x03\x00\x03\x00\x00\x00\x08" + data.to_bytes(4, "big") + (5).to_bytes(4, "big"))
        assert closed.wait(10)
        assert client.read_all(error) == b""


def test_a_client_that_leaves_closes_its_connections_to_the_pod(node):
    closed = threading.Event()

    def wait(connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"hello")
            connection.recv(1)
        closed.set()

    with listening(wait) as port:
        client = over_spdy(node)
        _, data = pair(client, port)
        client.until(lambda: client.received[data] == b"hello")
        client.leave()
        assert closed.wait(10)


def test_the_end_of_a_pod_ends_its_port_forwards(node):
    with listening(lambda connection: threading.Event().wait(20)) as port:
        client = over_spdy(node)
        pair(client, port)
        client.until(lambda: len(client.replied) == 2)
        node.server.end_sandbox(SANDBOX)
        client.to_the_end()
        assert client.goaway == 0


def test_a_stream_without_its_other_half_gets_an_error(make_node):
    client = over_spdy(make_node(streams=0.3))
    error = client.open(streamtype="error", port="80", requestid="1")
    data = client.open(streamtype="data", port="80", requestid="2")
    assert b"was not opened in time" in client.read_all(error)
    client.until(lambda: data in client.reset)


def test_thousands_of_streams_are_refused_at_the_limit(node):
    client = over_spdy(node)
    for number in range(1001):
        client.open(streamtype="error", port="80", requestid=str(number))
    client.until(lambda: client.reset and len(client.replied) == 1000)
    assert list(client.reset.values()) == [3]
    assert len(client.replied) == 1000


# --- the WebSocket protocol of its own


def test_each_channel_begins_with_the_ports_number(node):
    with listening(lambda connection: connection.sendall(b"from the pod")) as port:
        client = websocket(node.forward(port, closed_port()), "v4.channel.k8s.io")
        got = client.all_until_close()
        assert got[0] == port.to_bytes(2, "little") + b"from the pod"
        assert got[1] == port.to_bytes(2, "little")
        assert b"refused" in got[3][2:]


def test_websocket_ports_carry_input(node):
    def greet(connection: socket.socket) -> None:
        connection.sendall(b"hello " + connection.recv(100))

    with listening(greet) as port:
        client = websocket(node.forward(port), "v4.base64.channel.k8s.io")
        assert client.message_base64() == (0, port.to_bytes(2, "little"))
        assert client.message_base64() == (1, port.to_bytes(2, "little"))
        client.send_base64(0, b"world")
        assert client.message_base64() == (0, b"hello world")
        assert client.next()[0] == CLOSE


@pytest.mark.parametrize(
    ("ports", "protocol"), [((), "v4.channel.k8s.io"), (tuple(range(1, 7)), "v4.base64.channel.k8s.io")]
)
def test_the_websocket_protocol_needs_a_valid_number_of_ports(node, ports, protocol):
    _, head, _ = asked(node.forward(*ports), protocol)
    assert head.startswith("HTTP/1.1 400 ")


@contextlib.contextmanager
def a_screen(path: str) -> Iterator[None]:
    """A VNC server that sends its greeting, then echoes its input."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(b"RFB 003.008\n")
                        while received := connection.recv(1 << 16):
                            connection.sendall(received)

        threading.Thread(target=serve, daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def test_the_vnc_port_leads_to_the_screen_and_other_ports_to_the_pod(node, tmp_path):
    path = str(tmp_path / "vnc.sock")
    with a_screen(path), listening(upper) as port:
        client = spdy(node.forward_with_vnc(path), PORTFORWARD)
        _, data = pair(client, 5900)
        client.write(data, b"hello", fin=True)
        assert client.read_all(data) == b"RFB 003.008\nhello"
        _, other = pair(client, port, "1")
        client.write(other, b"hello", fin=True)
        assert client.read_all(other) == b"HELLO"


def test_a_missing_screen_is_reported(node, tmp_path):
    client = spdy(node.forward_with_vnc(str(tmp_path / "none")), PORTFORWARD)
    error, _ = pair(client, 5900)
    assert b"port 5900 cannot be reached in the guest: no such file" in client.read_all(error)


def test_our_own_client_relays_a_screen_until_either_side_leaves(node, tmp_path):
    path = str(tmp_path / "vnc.sock")
    sent = bytes(range(256)) * 4000
    with a_screen(path):
        near, ours = socket.socketpair()
        with near, contextlib.closing(connect(node.forward_with_vnc(path, 5900), FORWARD)) as far:
            relaying = threading.Thread(target=copy_both_ways, args=(ours, far), daemon=True)
            relaying.start()
            typing = threading.Thread(target=near.sendall, args=(sent,), daemon=True)
            typing.start()
            got = b""
            while len(got) < 12 + len(sent):
                got += near.recv(1 << 16)
            assert got == b"RFB 003.008\n" + sent
            near.shutdown(socket.SHUT_WR)
            relaying.join(20)
            assert not relaying.is_alive()
        ours.close()


def test_our_own_client_reports_why_there_is_no_screen(node, tmp_path):
    near, ours = socket.socketpair()
    far = connect(node.forward_with_vnc(str(tmp_path / "no"), 5900), FORWARD)
    with near, ours, contextlib.closing(far), pytest.raises(WrongState, match="no such file"):
        copy_both_ways(ours, far)


# --- dialed in the guest


async def shouting(session: FakeSession) -> int:
    """A service that answers after the client has closed its half."""
    said = b""
    while data := await session.stdin.get():
        said += data
    await session.out(said.upper())
    return 0


@pytest.fixture(params=["spdy", "tunnel"])
def inside(request, node) -> SpdyClient:
    if request.param == "spdy":
        return spdy(node.forward_inside(), PORTFORWARD)
    return SpdyClient(Tunnel(websocket(node.forward_inside(), TUNNEL)))


def test_a_port_in_the_guest_passes_both_ways_and_sees_the_clients_half_close(node, inside):
    node.sessions.script = shouting
    error, data = pair(inside, 81)
    inside.write(data, b"get ")
    inside.write(data, b"this", fin=True)
    assert inside.read_all(data) == b"GET THIS"
    assert inside.read_all(error) == b""
    assert node.sessions.dialed == [(CONTAINER, 81)]
    wait_until(node.sessions.started[0].closed.is_set, 5, "the session is closed")


def test_a_service_in_the_guest_that_hangs_up_ends_the_connection(node, inside):
    async def hangs_up(session: FakeSession) -> int:
        await session.out(b"bye")
        return 0

    node.sessions.script = hangs_up
    error, data = pair(inside, 81)
    inside.write(data, b"and nobody reads this")
    assert inside.read_all(data) == b"bye"
    assert inside.read_all(error) == b""
    wait_until(node.sessions.started[0].closed.is_set, 5, "the session is closed")


def test_a_port_that_the_guest_refuses_is_reported_with_the_guests_error(node, inside):
    async def refused(session: FakeSession) -> int:
        await session.err(b"nc: can't connect: Connection refused\n")
        return 1

    node.sessions.script = refused
    error, data = pair(inside, 81)
    assert inside.read_all(error) == (
        b"connecting to port 81 inside the guest failed: nc: can't connect: Connection refused"
    )
    assert inside.read_all(data) == b""


def test_a_guest_that_runs_no_commands_is_reported(node, inside):
    node.sessions.refuse = Unavailable("the guest agent does not answer")
    error, _ = pair(inside, 81)
    assert b"port 81 cannot be reached in the guest: the guest agent does not answer" in inside.read_all(error)


def test_a_guest_that_dies_is_reported(node, inside):
    async def dies(session: FakeSession) -> int:
        await session.out(b"half of ")
        raise Unavailable("the virtual machine ended")

    node.sessions.script = dies
    error, data = pair(inside, 81)
    assert inside.read_all(data) == b"half of "
    assert b"the virtual machine ended" in inside.read_all(error)
