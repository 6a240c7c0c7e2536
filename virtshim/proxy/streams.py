"""Merges the streams of all runtimes: streamed lists, and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.proxy.backend import Asked, Backend, CallFailed
from virtshim.proxy.last_known import LastKnown
from virtshim.proxy.lists import asks_for_all, refuse
from virtshim.proxy.shared_pods import SharedPods, VmStats, with_vms
from virtshim.proxy.wire import LIST_CONTAINERS, LIST_PODS

# Messages that a listener has not read yet. Beyond that, the proxy stops reading, and the runtimes treat it as a slow listener.
_ROOM: Final = 64
# Seconds between attempts to listen to a runtime that may be down.
_AGAIN: Final = 1.0
_POD_STATS: Final = "StreamPodSandboxStats"
# The list for each streamed list: the same messages with the same field numbers.
_LISTED_BY: Final = {"StreamPodSandboxes": LIST_PODS, "StreamContainers": LIST_CONTAINERS}

Pieces = AsyncGenerator[bytes, None]


@dataclass(frozen=True, slots=True)
class _Begun:
    """A runtime's streamed list: the first piece and the rest. `kept_as`: under which list the complete answer is kept; "" for
    none."""

    head: list[bytes]
    rest: Pieces
    kept_as: str = ""


class Streams:
    def __init__(
        self,
        backends: Sequence[Backend],
        last_known: LastKnown,
        patience: float,
        shared: SharedPods | None = None,
    ) -> None:
        self._backends = backends
        self._last_known = last_known
        self._patience = patience
        self._shared = shared

    async def pieces(self, asked: Asked) -> Pieces:
        """Merges streamed lists. Passes nothing on before every runtime has begun: if one lacks the method, the call fails
        as if all did, so that kubelet asks for an unstreamed list."""
        since = self._last_known.asking()
        vms: VmStats = {}
        if self._shared and asked.method.endswith(f"/{_POD_STATS}"):  # before the time for the primary's answer begins
            vms = await self._shared.vm_stats(asked.remaining)
        begun = await asyncio.gather(*(self._begin(backend, asked, vms) for backend in self._backends))
        try:
            refuse([one for one in begun if isinstance(one, CallFailed)])
            for backend, one in zip(self._backends, begun, strict=True):
                if isinstance(one, CallFailed):
                    continue
                kept = list(one.head)
                for piece in one.head:
                    yield piece
                async for piece in one.rest:
                    if one.kept_as:
                        kept.append(piece)
                    yield piece
                if one.kept_as:
                    self._last_known.keep(backend.name, one.kept_as, b"".join(kept), since)
        finally:
            for one in begun:
                if not isinstance(one, CallFailed):
                    await one.rest.aclose()

    async def _begin(self, backend: Backend, asked: Asked, vms: VmStats) -> _Begun | CallFailed:
        """`vms`: to be added to the primary's answer."""
        rest = backend.read(asked.method, asked.request, asked.remaining, asked.metadata)
        if vms and backend is self._backends[0]:
            rest = _with_vms(rest, vms)
        listed_by = _LISTED_BY.get(asked.method.rpartition("/")[2], "")
        kept = asks_for_all(asked.request) and self._last_known.keeps(backend.name, listed_by)
        try:
            async with asyncio.timeout(self._patience):
                head = await anext(rest, None)
                return _Begun([] if head is None else [head], rest, listed_by if kept else "")
        except TimeoutError:
            failed = backend.silent(self._patience)
        except CallFailed as exc:
            failed = exc
        await rest.aclose()
        if failed.is_down and self._last_known.stands_in(backend.name):
            return _Begun([self._last_known.answer(backend.name, listed_by, asked.request)], rest)
        return failed

    async def events(self, asked: Asked) -> Pieces:
        """Ends or fails as soon as one runtime's stream does, because the listener has missed events and must start again.
        The proxy itself reconnects to runtimes that may be down."""
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
                async for told in backend.read(asked.method, asked.request, asked.remaining, asked.metadata):
                    event = await self._shared.event(backend, told) if self._shared else told
                    if event is not None:
                        await room.put(event)
            except CallFailed as exc:
                end = exc
            if not backend.runtime.degraded or (end is not None and not end.is_down):
                await room.put(end)
                return
            await asyncio.sleep(_AGAIN)
            await backend.wait_until_back()


async def _with_vms(pieces: Pieces, vms: VmStats) -> Pieces:
    """The primary's streamed stats of pods, with those of the VMs' containers."""
    async with aclosing(pieces):
        async for piece in pieces:
            yield with_vms(piece, pb.StreamPodSandboxStatsResponse, vms)
