"""Clients and pods of exec, attach and port-forward are limited if they take all they can, do not read, or end
unexpectedly."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from fakes.podservice import listening
from fakes.spdy import SpdyClient, close_all, connected, spdy
from fakes.streamnode import StreamNode
from podclient import wait_until

from virtshim.model.ids import ContainerId
from virtshim.streaming.channel import Pipe
from virtshim.streaming.connection import StreamTimeouts
from virtshim.streaming.ports import AttachStreams, Streams
from virtshim.streaming.room import StreamLimits, StreamRoom

pytestmark = pytest.mark.hostile

PORTFORWARD = "portforward.k8s.io"
HOSTILE, OTHER = "default/hostile", "default/other"


@pytest.fixture
def make_node() -> Iterator[Callable[..., StreamNode]]:
    made: list[StreamNode] = []

    def make(**limits: int) -> StreamNode:
        made.append(StreamNode(StreamTimeouts(linger=0.2, leaving=1.0), StreamLimits(**limits)))
        made[-1].start()
        return made[-1]

    yield make
    close_all()
    for node in made:
        node.server.stop()


def pair(client: SpdyClient, port: int, request_id: int = 0) -> tuple[int, int]:
    """The error and data streams of one connection, as client-go opens them."""
    error = client.open(streamtype="error", port=str(port), requestid=str(request_id))
    client.write(error, b"", fin=True)
    return error, client.open(streamtype="data", port=str(port), requestid=str(request_id))


def upper(connection: socket.socket) -> None:
    said = b""
    while received := connection.recv(1 << 16):
        said += received
    connection.sendall(said.upper())


def is_served(node: StreamNode) -> bool:
    """Whether another pod's client is served."""
    with listening(upper) as port:
        client = spdy(node.forward(pod=OTHER), PORTFORWARD)
        _, data = pair(client, port)
        client.write(data, b"hello", fin=True)
        answer = client.read_all(data)
        client.leave()
    return answer == b"HELLO"


def attach(node: StreamNode, pod: str) -> str:
    wanted = AttachStreams(ContainerId("c" * 64), Streams(stdin=True, stdout=True), pod=pod)
    return node.server.offer(wanted)


# --- sessions


def test_sessions_beyond_a_pods_limit_get_429_and_other_pods_are_served(
    make_node: Callable[..., StreamNode],
) -> None:
    node = make_node(pod_sessions=3, sessions=100)
    clients = [spdy(attach(node, HOSTILE)) for _ in range(3)]
    sock, head = connected(attach(node, HOSTILE), "v4.channel.k8s.io")
    assert head.startswith("HTTP/1.1 429 Too Many Requests\r\n")
    told = sock.recv(4096).decode()
    assert told == (
        "pod default/hostile has 3 sessions of exec, attach and port-forward, the limit for one pod; end some, or raise "
        "streaming.pod_sessions\n"
    )
    assert node.server.refused(HOSTILE) == {"urls": 0, "sessions": 1, "connections": 0}
    assert is_served(node)
    clients[0].leave()
    wait_until(lambda: is_let_in(attach(node, HOSTILE)), 10, "its place is free again")


def is_let_in(url: str) -> bool:
    _, head = connected(url, "v4.channel.k8s.io")
    return head.startswith("HTTP/1.1 101 ")


def test_a_pod_without_sessions_gets_one_while_many_pods_hold_sessions(make_node: Callable[..., StreamNode]) -> None:
    node = make_node(pod_sessions=4, sessions=8)
    heads = [connected(attach(node, f"default/{n % 2}"), "v4.channel.k8s.io")[1] for n in range(8)]
    assert sum(head.startswith("HTTP/1.1 101 ") for head in heads) == 6
    assert is_served(node)


def test_a_client_that_leaves_during_its_handshake_takes_no_place(
    make_node: Callable[..., StreamNode],
) -> None:
    node = make_node(pod_sessions=2, sessions=8)
    for _ in range(10):
        url = attach(node, HOSTILE)
        address, _, path = url.removeprefix("http://").partition("/")
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(f"GET /{path} HTTP/1.1\r\nHost: x\r\nConnection: Upg".encode())
    wait_until(lambda: is_let_in(attach(node, HOSTILE)), 10, "both places are free")


# --- forwarded connections


def idle(connection: socket.socket) -> None:
    """A peer that never reads and never writes."""
    threading.Event().wait(20)


def test_a_pods_forwarded_connections_beyond_its_limit_are_refused_with_the_remedy(
    make_node: Callable[..., StreamNode],
) -> None:
    node = make_node(pod_connections=3)
    with listening(upper) as port:
        client = spdy(node.forward(pod=HOSTILE), PORTFORWARD)
        pairs = [pair(client, port, number) for number in range(4)]
        assert client.read_all(pairs[3][0]).decode() == (
            "pod default/hostile has 3 forwarded connections, the limit for one pod; close some, or raise "
            "streaming.pod_connections"
        )
        client.write(pairs[0][1], b"bye", fin=True)
        assert client.read_all(pairs[0][1]) == b"BYE"
        _, data = pair(client, port, 5)
        client.write(data, b"a place is free", fin=True)
        assert client.read_all(data) == b"A PLACE IS FREE"
    assert is_served(node)


@contextlib.contextmanager
def deaf() -> Iterator[int]:
    """A pod's service that reads nothing, and whose kernel buffers little."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        yield listener.getsockname()[1]


def held() -> int:
    """The bytes in all pipes of this process."""
    gc.collect()
    return sum(found.waiting for found in gc.get_objects() if isinstance(found, Pipe))


def send_all_it_takes(client: SpdyClient, streams: list[int], most: int) -> None:
    """Sends to each in turn until the server stops reading."""
    client.sock.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        for _ in range(most // len(streams) // 32768):
            for stream in streams:
                client.write(stream, b"x" * 32768)


def test_fifty_connections_to_a_guest_that_does_not_read_stay_within_the_pods_limit(
    make_node: Callable[..., StreamNode],
) -> None:
    node = make_node(pod_bytes=1 << 20)
    with deaf() as port:
        client = spdy(node.forward(pod=HOSTILE), PORTFORWARD)
        streams = [pair(client, port, number)[1] for number in range(50)]
        client.until(lambda: len(client.replied) == 100)
        send_all_it_takes(client, streams, 64 << 20)
        assert held() <= (1 << 20) + 65536 + 50 * (16 << 10)
        assert is_served(node)


def test_many_sessions_to_a_guest_that_does_not_read_share_the_pods_limit(
    make_node: Callable[..., StreamNode],
) -> None:
    node = make_node(pod_bytes=1 << 20)
    with deaf() as port:
        for _ in range(12):
            client = spdy(node.forward(pod=HOSTILE), PORTFORWARD)
            _, data = pair(client, port)
            client.until(lambda client=client: len(client.replied) == 2)
            send_all_it_takes(client, [data], 4 << 20)
        assert held() <= (1 << 20) + 65536 + 12 * (16 << 10)
        assert is_served(node)


def test_the_memory_of_a_session_is_freed_when_it_ends(make_node: Callable[..., StreamNode]) -> None:
    node = make_node(pod_bytes=1 << 20)
    with deaf() as port:
        client = spdy(node.forward(pod=HOSTILE), PORTFORWARD)
        streams = [pair(client, port, number)[1] for number in range(8)]
        client.until(lambda: len(client.replied) == 16)
        send_all_it_takes(client, streams, 16 << 20)
        resets(client.sock)
        client.leave()
        wait_until(lambda: held() == 0, 10, "nothing is held")
        client = spdy(node.forward(pod=HOSTILE), PORTFORWARD)
        streams = [pair(client, port, number)[1] for number in range(8)]
        client.until(lambda: len(client.replied) == 16)
        send_all_it_takes(client, streams, 16 << 20)
        assert held() > 1 << 19, "the pod may hold as much as before"


def test_a_pod_at_its_memory_limit_continues_slowly_and_others_at_full_speed() -> None:
    async def test() -> None:
        room = StreamRoom(StreamLimits(pod_bytes=1 << 20, bytes=2 << 20))
        with room.session(HOSTILE) as first, room.session(HOSTILE) as second, room.session(OTHER) as other:
            full = [first.pipe() for _ in range(4)]
            for pipe in full:
                pipe.put(b"x" * (256 << 10))
            assert await second.pipe().room() == 16 << 10
            assert await other.pipe().room() == 64 << 10
            begun = second.pipe()
            begun.put(b"x")
            waiting = asyncio.create_task(begun.room())
            await asyncio.sleep(0)
            assert not waiting.done()
            await full[0].read()
            await asyncio.sleep(0)
            assert not waiting.done(), "it is being passed on"
            reading = asyncio.create_task(full[0].read())
            assert await waiting == 64 << 10
            reading.cancel()

    asyncio.run(asyncio.wait_for(test(), 10))


def test_each_pod_keeps_its_reserve_when_the_nodes_memory_limit_is_reached() -> None:
    async def test() -> None:
        room = StreamRoom(StreamLimits(pod_bytes=1 << 20, bytes=2 << 20))
        with contextlib.ExitStack() as stack:
            for number in range(3):
                pipe = stack.enter_context(room.session(f"default/{number}")).pipe()
                pipe.put(b"x" * (1 << 20))
            other = stack.enter_context(room.session(OTHER))
            pipe = other.pipe()
            for _ in range(4):
                assert await pipe.room() == 64 << 10
                pipe.put(b"x" * (64 << 10))

    asyncio.run(asyncio.wait_for(test(), 10))


# --- what a pod's end does


def resets(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def resets_in_the_middle(connection: socket.socket) -> None:
    connection.sendall(b"half")
    resets(connection)


def ends_at_once(connection: socket.socket) -> None:
    pass


def speaks_spdy(connection: socket.socket) -> None:
    connection.sendall(b"\x80\x03\x00\x07\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x00" * 100)


def says_a_lot(connection: socket.socket) -> None:
    connection.sendall(bytes(range(256)) * 4096)


def ends_its_half_and_listens(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(65536):
        pass


PEERS = {
    "ends at once": ends_at_once,
    "resets at once": resets,
    "resets in the middle": resets_in_the_middle,
    "answers in frames of our own protocol": speaks_spdy,
    "says a mebibyte that nobody asked for": says_a_lot,
    "ends its half and listens": ends_its_half_and_listens,
}


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_however_a_pods_service_closes_its_client_sees_the_end_and_others_are_served(
    make_node: Callable[..., StreamNode], peer: Callable[[socket.socket], None]
) -> None:
    node = make_node()
    with listening(peer) as port:
        client = spdy(node.forward(pod=HOSTILE), PORTFORWARD)
        error, data = pair(client, port)
        client.write(data, b"hello", fin=True)
        client.read_all(data)
        told = client.read_all(error).decode()
    assert told == "" or "port" in told
    assert is_served(node)


def test_a_pod_is_not_read_while_its_client_does_not_read(
    make_node: Callable[..., StreamNode],
) -> None:
    node, sent, blocked = make_node(), [0], threading.Event()

    def floods(connection: socket.socket) -> None:
        connection.settimeout(1.0)
        try:
            while sent[0] < 256 << 20:
                sent[0] += connection.send(b"x" * 65536)
        except TimeoutError:
            pass
        blocked.set()
        threading.Event().wait(10)

    with listening(floods) as port:
        client = spdy(node.forward(pod=HOSTILE), PORTFORWARD)
        pair(client, port)
        assert blocked.wait(60)
        assert sent[0] < 64 << 20
        assert is_served(node)
