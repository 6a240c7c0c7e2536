"""Sessions of all kinds leave nothing behind, whether their clients leave politely or vanish."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable

from fakes.podservice import listening
from fakes.sessions import FakeSession
from fakes.spdy import SpdyClient, spdy
from fakes.ws import WsClient, websocket
from podclient import wait_until

SESSIONS = 50
PORTFORWARD = "portforward.k8s.io"

Client = SpdyClient | WsClient


async def chatty(session: FakeSession) -> int:
    """A command that ends with its input and until then writes more than anybody reads."""
    while data := await session.stdin.get():
        for _ in range(20):
            await session.out(data)
    return 0


def remote(url: str) -> SpdyClient:
    client = spdy(url)
    streams = {name: client.open(streamtype=name) for name in ("error", "stdin", "stdout")}
    client.until(lambda: client.replied >= set(streams.values()))
    client.write(streams["stdin"], b"x" * 50_000)
    return client


def over_websocket(url: str) -> WsClient:
    client = websocket(url)
    client.send(0, b"x" * 50_000)
    return client


def forwarding(url: str, port: int) -> SpdyClient:
    client = spdy(url, PORTFORWARD)
    streams = [client.open(streamtype=kind, port=str(port), requestid="1") for kind in ("error", "data")]
    client.until(lambda: client.replied >= set(streams))
    client.write(streams[1], b"x" * 50_000)
    return client


def polite(client: Client) -> None:
    if isinstance(client, SpdyClient):
        client.leave()
    else:
        client.close()
        client.sock.close()


def vanish(client: Client) -> None:
    """Vanishes as a machine that lost its power: sends a reset at any moment."""
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sock.close()


def test_no_task_descriptor_or_session_outlives_its_client(node):
    node.sessions.script = chatty

    def tasks() -> int:
        return asyncio.run_coroutine_threadsafe(_count(), node.sessions.loop).result(10)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with listening(lambda connection: connection.sendall(connection.recv(100)) or connection.recv(1)) as port:
        kinds: list[Callable[[], Client]] = [
            lambda: remote(node.exec(stdin=True, stdout=True)),
            lambda: remote(node.attach()),
            lambda: over_websocket(node.exec(stdin=True, stdout=True)),
            lambda: forwarding(node.forward(), port),
            lambda: forwarding(node.forward_inside(), port),
        ]
        for first in (kinds[0], kinds[3]):  # whatever is imported or opened once
            polite(first())
        wait_until(lambda: node.sessions.loop is not None and tasks() == 0, 10, "the first are gone")
        before = descriptors()
        clients = [kinds[number % len(kinds)]() for number in range(SESSIONS)]
        assert tasks() >= SESSIONS
        for number, client in enumerate(clients):
            (polite if number % 2 else vanish)(client)
        wait_until(lambda: tasks() == 0, 20, "no task is left on the loop")
        wait_until(lambda: descriptors() <= before, 20, "no descriptor is left")
    assert len(node.sessions.started) == 1 + SESSIONS * 4 // 5
    assert all(session.closed.is_set() for session in node.sessions.started)


async def _count() -> int:
    """The number of tasks other than the server's and this one."""
    return len(asyncio.all_tasks()) - 2
