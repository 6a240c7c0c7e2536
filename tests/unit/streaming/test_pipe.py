"""A bounded pipe makes readers and writers wait, and ends their wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes.journal import WAIT_LIMIT

from virtshim.streaming.channel import Gone, Pipe, put
from virtshim.streaming.room import SessionRoom, StreamLimits, StreamRoom


def pipe_of(limit: int) -> Pipe:
    return Pipe(SessionRoom(StreamRoom(StreamLimits()), "team/pod"), limit)


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, WAIT_LIMIT))


def test_a_pipe_gives_back_all_that_was_put_and_then_the_end():
    async def test() -> None:
        pipe = pipe_of(256 << 10)
        pipe.put(b"one ")
        pipe.put(b"two")
        pipe.end()
        pipe.put(b"too late")
        assert await pipe.read() == b"one two"
        assert [await pipe.read() for _ in range(2)] == [b"", b""]

    run(test())


def test_a_reader_waits_for_the_writer():
    async def test() -> None:
        pipe = pipe_of(256 << 10)
        reading = asyncio.create_task(pipe.read())
        await asyncio.sleep(0)
        assert not reading.done()
        pipe.put(b"now")
        assert await reading == b"now"

    run(test())


def test_a_full_pipe_blocks_its_writer_until_it_is_read():
    async def test() -> None:
        pipe = pipe_of(10)
        pipe.put(b"0123456789")
        waiting = asyncio.create_task(pipe.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        await pipe.read()
        await waiting

    run(test())


def test_a_discarding_pipe_always_has_room_and_keeps_nothing():
    async def test() -> None:
        pipe = pipe_of(10)
        pipe.put(b"0123456789")
        pipe.discard()
        await pipe.room()
        pipe.put(b"more")
        pipe.end()
        assert await pipe.read() == b""

    run(test())


def test_a_writer_that_waits_notices_that_the_client_has_left():
    async def test() -> None:
        pipe = pipe_of(1)
        pipe.put(b"full")
        looks = iter([False, False, True])
        with pytest.raises(Gone):
            await put(pipe, b"more", lambda: next(looks), look_every=0.01)

    run(test())
