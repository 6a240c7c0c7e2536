"""Sets the size of guests' consoles to that of their clients: the newest wins, one at a time, without blocking.

A serial line cannot carry a size, so it goes by the guest's agent. A guest without one keeps the size that it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog

from virtshim.domain.errors import ShimError
from virtshim.domain.ids import ContainerId

log = structlog.get_logger(__name__)

# Container, columns, rows, seconds. Blocks; raises ShimError.
SetSize = Callable[[ContainerId, int, int, float], None]

# Seconds: for the agent, and between two sizes of one console, as a window that is dragged has many.
_ANSWER: Final = 3.0
_PAUSE: Final = 0.3
_MAX: Final = 0xFFFF
# Guests that are told at the same time, each by one thread: silent ones keep nobody else waiting.
_THREADS: Final = 512


class ConsoleSizes:
    """One for all consoles."""

    def __init__(self, tell: SetSize) -> None:
        self._set = tell
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="console-size")

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def of(self, container: ContainerId) -> ConsoleSize:
        return ConsoleSize(lambda columns, rows: self._set_size(container, columns, rows), self._executor)

    def _set_size(self, container: ContainerId, columns: int, rows: int) -> None:
        try:
            self._set(container, columns, rows, _ANSWER)
        except ShimError as exc:
            log.debug("console.size.not_set", container=container.short, why=str(exc))


class ConsoleSize:
    """Of one console. Lives on the streaming loop."""

    def __init__(self, tell: Callable[[int, int], None], executor: ThreadPoolExecutor) -> None:
        self._set = tell
        self._executor = executor
        self._newest: tuple[int, int] | None = None
        self._setting: asyncio.Task[None] | None = None

    def change(self, columns: int, rows: int) -> None:
        """Returns at once. Impossible sizes are ignored."""
        if not (0 < columns <= _MAX and 0 < rows <= _MAX):
            return
        self._newest = (columns, rows)
        if self._setting is None or self._setting.done():
            self._setting = asyncio.get_running_loop().create_task(self._set_newest())

    def close(self) -> None:
        if self._setting is not None:
            self._setting.cancel()

    async def _set_newest(self) -> None:
        while self._newest is not None:
            size, self._newest = self._newest, None
            await asyncio.get_running_loop().run_in_executor(self._executor, self._set, *size)
            await asyncio.sleep(_PAUSE)
