"""Tasks of which the first to end cancels the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_until(main: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, Any]) -> T | None:
    """The result of `main`; None, and `main` is cancelled, if one of the others returns first; if it raises first, its exception.
    Returns when all tasks have ended."""
    first = asyncio.ensure_future(main)
    rest = [asyncio.ensure_future(other) for other in others]
    try:
        await asyncio.wait([first, *rest], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (first, *rest):
            if not task.done():
                task.cancel()
        await asyncio.gather(first, *rest, return_exceptions=True)
    if not first.cancelled():
        return first.result()
    for task in rest:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return None


async def then_wait_forever(work: Coroutine[Any, Any, Any]) -> None:
    """For a task beside another in `run_until` whose end must not end the other."""
    await work
    await asyncio.Event().wait()
