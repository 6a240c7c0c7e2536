"""The small parts that hold sessions together: bounded pipes, and tasks that end each other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from virtshim.streaming import channel
from virtshim.streaming.channel import Gone, put
from virtshim.streaming.pipe import Pipe
from virtshim.streaming.racing import run_until, then_wait_forever


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 10))


async def never() -> None:
    await asyncio.Event().wait()


async def fails(error: Exception) -> None:
    raise error


async def value(of: object) -> object:
    return of


def test_a_pipe_gives_back_all_that_was_put_and_then_the_end():
    async def test() -> None:
        pipe = Pipe()
        pipe.put(b"one ")
        pipe.put(b"two")
        pipe.end()
        pipe.put(b"too late")
        assert await pipe.read() == b"one two"
        assert [await pipe.read() for _ in range(2)] == [b"", b""]

    run(test())


def test_a_reader_waits_for_the_writer():
    async def test() -> None:
        pipe = Pipe()
        reading = asyncio.create_task(pipe.read())
        await asyncio.sleep(0)
        assert not reading.done()
        pipe.put(b"now")
        assert await reading == b"now"

    run(test())


def test_a_full_pipe_holds_its_writer_until_it_is_read():
    async def test() -> None:
        pipe = Pipe(limit=10)
        pipe.put(b"0123456789")
        waiting = asyncio.create_task(pipe.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        await pipe.read()
        await waiting

    run(test())


def test_a_discarding_pipe_always_has_room_and_keeps_nothing():
    async def test() -> None:
        pipe = Pipe(limit=10)
        pipe.put(b"0123456789")
        pipe.discard()
        await pipe.room()
        pipe.put(b"more")
        pipe.end()
        assert await pipe.read() == b""

    run(test())


def test_a_writer_that_waits_notices_that_the_client_has_left(monkeypatch):
    monkeypatch.setattr(channel, "_STALL_CHECK", 0.01)

    async def test() -> None:
        pipe = Pipe(limit=1)
        pipe.put(b"full")
        looks = iter([False, False, True])
        with pytest.raises(Gone):
            await put(pipe, b"more", lambda: next(looks))

    run(test())


def test_the_main_task_wins():
    assert run(run_until(value(7), never(), never())) == 7
    assert run(run_until(value(7), then_wait_forever(value(8)))) == 7


def test_another_that_ends_first_ends_the_main_task():
    assert run(run_until(never(), value(1))) is None


def test_whoever_fails_first_is_heard():
    with pytest.raises(KeyError):
        run(run_until(fails(KeyError()), never()))
    with pytest.raises(ValueError, match=r"^$"):
        run(run_until(never(), fails(ValueError())))


def test_a_main_task_cleans_up_before_it_is_left():
    async def test() -> None:
        cleaned = asyncio.Event()

        async def main() -> None:
            try:
                await never()
            finally:
                await asyncio.sleep(0)
                cleaned.set()

        await run_until(main(), value(None))
        assert cleaned.is_set()

    run(test())


def test_one_that_is_cancelled_cancels_both():
    async def test() -> None:
        ended = []

        async def main() -> None:
            try:
                await never()
            finally:
                ended.append("main")

        race = asyncio.create_task(run_until(main(), never()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        race.cancel()
        with pytest.raises(asyncio.CancelledError):
            await race
        assert ended == ["main"]

    run(test())
