"""Of tasks in a race, the first to end cancels the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes.journal import WAIT_LIMIT

from virtshim.streaming.channel import run_until, then_wait_forever


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, WAIT_LIMIT))


async def never() -> None:
    await asyncio.Event().wait()


async def fails(error: Exception) -> None:
    raise error


async def value(of: object) -> object:
    return of


def test_the_main_task_wins():
    assert run(run_until(value(7), never(), never())) == 7
    assert run(run_until(value(7), then_wait_forever(value(8)))) == 7


def test_another_task_that_ends_first_cancels_the_main_task():
    assert run(run_until(never(), value(1))) is None


def test_the_first_failure_is_raised():
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


def test_cancelling_the_race_cancels_both_tasks():
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
