"""The client's connection slows down its sender, and notices when the client has left."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fakes.journal import WAIT_LIMIT

from virtshim.streaming.channel import PIECE, Gone, TcpChannel


@contextlib.asynccontextmanager
async def joined() -> AsyncIterator[tuple[TcpChannel, socket.socket]]:
    """A channel and its client, with little room in the kernel between them."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        client.setblocking(False)
        ours, _ = listener.accept()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            yield TcpChannel(reader, writer), client
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)


async def read(client: socket.socket, count: int) -> bytes:
    loop, seen = asyncio.get_running_loop(), b""
    while len(seen) < count:
        piece = await loop.sock_recv(client, 65536)
        if not piece:
            break
        seen += piece
    return seen


async def send_for_ever(channel: TcpChannel) -> None:
    while True:
        await channel.send(b"x" * PIECE)


def clock_of(loop: Any) -> Callable[[float], Awaitable[None]]:
    """Lets so many seconds pass for that loop, and what is due then happen."""
    real, ahead = loop.time, 0.0
    loop.time = lambda: real() + ahead

    async def pass_time(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds
        for _ in range(3):  # a timer fires, its task goes on, and waits anew
            await asyncio.sleep(0)

    return pass_time


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, WAIT_LIMIT))


def test_bytes_are_delivered_when_the_client_has_taken_them_all():
    async def test() -> None:
        async with joined() as (channel, client):
            await channel.send(b"x" * PIECE)
            delivering = asyncio.create_task(channel.delivered(10))
            await asyncio.sleep(0.2)
            assert not delivering.done()
            assert len(await read(client, PIECE)) == PIECE
            await delivering

    run(test())


def test_waiting_for_delivery_ends_at_the_time_limit_or_when_the_client_leaves():
    async def test() -> None:
        async with joined() as (channel, client):
            await channel.send(b"x" * PIECE)
            await channel.delivered(0.1)
            client.close()
            await channel.delivered(10)

    run(test())


def test_a_client_that_does_not_read_blocks_the_sender():
    async def test() -> None:
        async with joined() as (channel, client):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(send_for_ever(channel), 0.3)
            await read(client, PIECE)

    run(test())


def test_a_client_that_left_is_noticed_without_reading():
    async def test() -> None:
        async with joined() as (channel, client):
            assert not channel.gone()
            client.close()
            while not channel.gone():  # noqa: ASYNC110  the kernel tells of it nowhere else
                await asyncio.sleep(0)

    run(test())


def test_sending_to_a_client_that_left_is_an_error():
    async def test() -> None:
        async with joined() as (channel, client):
            client.close()
            with pytest.raises(Gone):
                await send_for_ever(channel)

    run(test())


def test_closing_delivers_sent_bytes_and_reads_the_rest():
    async def test() -> None:
        async with joined() as (channel, client):
            await channel.send(b"last words" + b"x" * PIECE)
            client.send(b"unread")
            closing = asyncio.create_task(channel.close(5))
            seen = await read(client, 1 << 30)
            assert seen == b"last words" + b"x" * PIECE
            client.close()
            await closing

    run(test())


def test_a_channel_is_idle_when_no_byte_has_moved_for_so_long():
    async def test() -> None:
        pass_time = clock_of(asyncio.get_running_loop())
        async with joined() as (channel, client):
            idle = asyncio.create_task(channel.idle(3000))
            for _ in range(4):
                client.send(b"x")
                await channel.receive()
                await pass_time(2000)
                assert not idle.done()
            await pass_time(2000)
            await idle

    asyncio.run(test())  # not `run`, whose limit goes by the same clock
