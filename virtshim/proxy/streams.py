"""Streams of all runtimes as one: lists in pieces, and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from virtshim.proxy.asked import Asked
from virtshim.proxy.backend import Backend, CallFailed
from virtshim.proxy.last_known import LastKnown
from virtshim.proxy.lists import refuse
from virtshim.proxy.methods import LIST_CONTAINERS, LIST_PODS

# Messages that one listener has not read yet; then the runtimes wait, or do with it what they do with slow listeners.
_ROOM: Final = 64
# Between two attempts to listen to a runtime that may be down.
_AGAIN: Final = 1.0
# The lists whose pieces these are: the same messages, by the same field numbers.
_LISTED_BY: Final = {"StreamPodSandboxes": LIST_PODS, "StreamContainers": LIST_CONTAINERS}

Pieces = AsyncGenerator[bytes, None]


class Streams:
    def __init__(self, backends: Sequence[Backend], last_known: LastKnown, patience: float) -> None:
        self._backends = backends
        self._last_known = last_known
        self._patience = patience

    async def pieces(self, asked: Asked) -> Pieces:
        """Lists. Every runtime has begun before the first piece is passed on: a method that one of them does not know ends as if
        nobody knew it, so that kubelet asks for the whole list instead."""
        begun = await asyncio.gather(*(self._begin(backend, asked) for backend in self._backends))
        try:
            refuse([one for one in begun if isinstance(one, CallFailed)])
            for one in begun:
                if not isinstance(one, CallFailed):
                    head, rest = one
                    for piece in head:
                        yield piece
                    async for piece in rest:
                        yield piece
        finally:
            for one in begun:
                if not isinstance(one, CallFailed):
                    await one[1].aclose()

    async def _begin(self, backend: Backend, asked: Asked) -> tuple[list[bytes], Pieces] | CallFailed:
        """Its first piece, if it has one, and the others."""
        rest = backend.read(asked.method, asked.request, asked.remaining, asked.metadata)
        try:
            async with asyncio.timeout(self._patience):
                async for head in rest:
                    return [head], rest
                return [], rest
        except TimeoutError:
            failed = backend.silent(self._patience)
        except CallFailed as exc:
            failed = exc
        await rest.aclose()
        if failed.is_down and backend.runtime.degraded:
            listed_by = _LISTED_BY.get(asked.method.rpartition("/")[2], "")
            return [self._last_known.answer(backend.name, listed_by, asked.request)], rest
        return failed

    async def events(self, asked: Asked) -> Pieces:
        """Ends, or fails, as soon as one runtime's stream does: its listener has missed something and begins anew. But one that
        may be down is listened to again when it is back."""
        room: asyncio.Queue[bytes | CallFailed | None] = asyncio.Queue(_ROOM)
        listening = [asyncio.create_task(self._listen(backend, asked, room)) for backend in self._backends]
        try:
            while True:
                event = await room.get()
                if isinstance(event, CallFailed):
                    raise event
                if event is None:
                    return
                yield event
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)

    async def _listen(self, backend: Backend, asked: Asked, room: asyncio.Queue[bytes | CallFailed | None]) -> None:
        while True:
            end: CallFailed | None = None
            try:
                async for event in backend.read(asked.method, asked.request, asked.remaining, asked.metadata):
                    await room.put(event)
            except CallFailed as exc:
                end = exc
            if not backend.runtime.degraded or (end is not None and not end.is_down):
                await room.put(end)
                return
            await asyncio.sleep(_AGAIN)
            await backend.wait_until_back()
