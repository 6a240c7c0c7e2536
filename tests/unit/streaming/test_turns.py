"""A client that sends a lot does not starve other clients."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Coroutine
from typing import Any

import pytest
from fakes.spdy import PING, SYN_STREAM, Writer, control, data

from virtshim.streaming.channel import PIECE
from virtshim.streaming.room import SessionRoom, StreamLimits, StreamRoom
from virtshim.streaming.spdy.peer import SpdyPeer
from virtshim.streaming.websocket import WebSocket

# Frames that others may have to wait for.
A_FEW = 100

ROOM = SessionRoom(StreamRoom(StreamLimits()), "team/pod")


class Once:
    """A channel whose client sends this, and leaves."""

    def __init__(self, said: bytes) -> None:
        self._said = [said]

    async def receive(self) -> bytes:
        return self._said.pop() if self._said else b""

    async def send(self, data: bytes) -> None: ...

    def gone(self) -> bool:
        return False


def turns_beside(work: Coroutine[Any, Any, object]) -> int:
    """How often others could do something until it was done."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def both() -> None:
        beside = asyncio.ensure_future(others())
        await work
        beside.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beside

    asyncio.run(both())
    return turns


async def read_all(said: bytes) -> None:
    ws = WebSocket(Once(said))
    while await ws.receive() is not None:
        pass


def spdy(said: bytes) -> Coroutine[Any, Any, None]:
    """Of a session with stream 1."""
    opened = Writer().syn_stream(1, {"streamtype": "stdin"})
    return SpdyPeer(Once(opened + said), 1, lambda _stream: None, ROOM.pipe).run()


def filling(frame: bytes) -> tuple[bytes, int]:
    """One read of such frames, and how many they are."""
    count = PIECE // len(frame)
    return frame * count, count


@pytest.mark.parametrize(
    "frame", [b"\x89\x80mask", b"\x82\x80mask", b"\x82\x81maskx"], ids=["ping", "empty", "a letter"]
)
def test_a_flood_of_tiny_websocket_frames_does_not_starve_others(frame: bytes) -> None:
    said, count = filling(frame)
    assert turns_beside(read_all(said)) >= count // A_FEW


@pytest.mark.parametrize(
    "frame",
    [data(1, b""), data(1, b"x"), control(PING, struct.pack(">I", 1)), control(200, b"")],
    ids=["empty", "a letter", "ping", "unknown"],
)
def test_a_flood_of_tiny_spdy_frames_does_not_starve_others(frame: bytes) -> None:
    said, count = filling(frame)
    assert turns_beside(spdy(said)) >= count // A_FEW


def test_input_in_large_frames_waits_for_nobody() -> None:
    piece = bytes(8 << 10)
    frames = PIECE // len(piece)
    assert turns_beside(read_all((b"\x82\xfe" + len(piece).to_bytes(2, "big") + b"mask" + piece) * frames)) == 0
    assert turns_beside(spdy(data(1, piece) * frames)) == 0


def test_spdy_frames_before_a_malformed_one_are_answered() -> None:
    sent = []

    class Kept(Once):
        async def send(self, data: bytes) -> None:
            sent.append(data)

    ping, mistake = control(PING, struct.pack(">I", 7)), control(SYN_STREAM, b"short")
    asyncio.run(SpdyPeer(Kept(ping + mistake), 1, lambda _stream: None, ROOM.pipe).run())
    assert b"".join(sent).startswith(ping)
    assert len(b"".join(sent)) == len(ping) + 16, "and told to go away"
