"""Port forwarding over SPDY: an error and a data stream for each connection, paired by the request id in their headers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

import structlog

from virtshim.streaming.channel import ByteChannel, Gone
from virtshim.streaming.portforward.splice import Dial, ForwardFailed, splice
from virtshim.streaming.racing import run_until
from virtshim.streaming.room import SessionRoom
from virtshim.streaming.spdy.frames import Status
from virtshim.streaming.spdy.peer import SpdyPeer, SpdyStream

log = structlog.get_logger(__name__)

PROTOCOLS: Final = ("portforward.k8s.io",)

# Two streams a connection.
_MAX_STREAMS: Final = 1000


@dataclass(slots=True)
class _Half:
    """The stream of a pair that came first, and the task that waits for the other."""

    stream: SpdyStream
    kind: str
    port: int
    overdue: asyncio.Task[None]


class SpdyForward:
    """All connections of one client to one pod."""

    def __init__(self, channel: ByteChannel, address: str, dial: Dial, pairing: float, room: SessionRoom) -> None:
        """`pairing`: seconds in which the second stream of a pair must come."""
        self._address = address
        self._dial = dial
        self._pairing = pairing
        self._room = room
        self._halves: dict[str, _Half] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._peer = SpdyPeer(channel, _MAX_STREAMS, self._opened, room.pipe)

    async def serve(self, ended: asyncio.Event) -> None:
        """Until the client leaves, or `ended`: the pod has stopped."""
        try:
            await run_until(self._peer.run(), ended.wait())
        except Gone:
            pass
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            with contextlib.suppress(Gone):
                await self._peer.leave()

    def _opened(self, stream: SpdyStream) -> Status | None:
        kind = stream.headers.get("streamtype", "")
        port = _port(stream.headers.get("port", ""))
        if kind not in ("error", "data") or port is None:
            return Status.REFUSED_STREAM
        key = stream.headers.get("requestid", "") or _key_without_request_id(stream.number, kind)
        half = self._halves.get(key)
        if half is None:
            self._halves[key] = _Half(stream, kind, port, self._spawn(self._overdue(key)))
        elif half.kind == kind or half.port != port:
            return Status.REFUSED_STREAM
        else:
            del self._halves[key]
            half.overdue.cancel()
            error, data = (half.stream, stream) if kind == "data" else (stream, half.stream)
            _ = self._spawn(self._connection(error, data, port))
        return None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("streaming.forward.crashed", exc_info=error)

    async def _overdue(self, key: str) -> None:
        await asyncio.sleep(self._pairing)
        stream = self._halves.pop(key).stream
        with contextlib.suppress(Gone):
            if stream.headers["streamtype"] == "error":
                await stream.write(b"the data stream of this connection was not opened in time")
                await stream.finish()
            else:
                await stream.reset()

    async def _connection(self, error: SpdyStream, data: SpdyStream, port: int) -> None:
        error.incoming.discard()
        failed = ""
        try:
            with self._room.connection():
                await run_until(splice(data, self._dial, self._address, port), data.reset_by_client.wait())
        except ForwardFailed as exc:
            failed = str(exc)
        except Gone:
            pass
        with contextlib.suppress(Gone):
            data.incoming.discard()
            if failed:
                await error.write(failed.encode(errors="replace"))
            await data.finish()
            await error.finish()
            # A client that still sends, to a pod that no longer listens, learns that nobody reads.
            if not data.incoming.ended:
                await data.reset()


def _port(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        return None
    return int(text) if 1 <= int(text) <= 65535 else None


def _key_without_request_id(number: int, kind: str) -> str:
    """Clients before request ids opened the error stream, then at once the data stream: the next odd number."""
    return f"stream {number if kind == 'error' else number - 2}"
