"""Remotecommand over SPDY: one stream each for error, stdin, stdout, stderr and resize."""

from __future__ import annotations

import asyncio
from typing import Final

from virtshim.domain.guest.streaming import OutStream, Streams
from virtshim.streaming.channel import ByteChannel
from virtshim.streaming.remotecommand.status import Outcome, as_status, as_text
from virtshim.streaming.room import SessionRoom
from virtshim.streaming.spdy.frames import Status
from virtshim.streaming.spdy.peer import SpdyPeer, SpdyStream

# In the order the server prefers them. v1 clients of Kubernetes 1.0 name no version at all.
PROTOCOLS: Final = (
    "v5.channel.k8s.io",
    "v4.channel.k8s.io",
    "v3.channel.k8s.io",
    "v2.channel.k8s.io",
    "channel.k8s.io",
    "",
)
_WITH_STATUS: Final = frozenset({"v5.channel.k8s.io", "v4.channel.k8s.io"})
_WITH_RESIZE: Final = _WITH_STATUS | {"v3.channel.k8s.io"}

_MAX_STREAMS: Final = 8


class SpdyRemote:
    """Implements `remotecommand.session.RemoteClient`."""

    def __init__(self, channel: ByteChannel, wanted: Streams, protocol: str, room: SessionRoom) -> None:
        self._protocol = protocol
        self._wanted = _names(wanted, protocol)
        self._streams: dict[str, SpdyStream] = {}
        self._complete = asyncio.Event()
        self._peer = SpdyPeer(channel, _MAX_STREAMS, self._opened, room.pipe)

    def _opened(self, stream: SpdyStream) -> Status | None:
        name = stream.headers.get("streamtype", "").lower()
        if name not in self._wanted or name in self._streams:
            return Status.REFUSED_STREAM
        self._streams[name] = stream
        if self._streams.keys() == self._wanted:
            self._complete.set()
        return None

    async def run(self) -> None:
        await self._peer.run()

    async def ready(self) -> None:
        await self._complete.wait()

    async def stdin(self) -> bytes:
        return await self._read("stdin")

    async def resize(self) -> bytes:
        return await self._read("resize")

    async def _read(self, name: str) -> bytes:
        stream = self._streams.get(name)
        return await stream.read() if stream else b""

    async def write(self, stream: OutStream, data: bytes) -> None:
        target = self._streams.get(stream.value)
        if target is None or target.reset_by_client.is_set():
            return
        await target.write(data)

    async def finish(self, outcome: Outcome) -> None:
        """Output ends before the error stream does: clients read it in this order."""
        for name in ("stdout", "stderr"):
            if name in self._streams:
                await self._streams[name].finish()
        error = self._streams.get("error")
        if error is not None and not error.reset_by_client.is_set():
            await error.write(as_status(outcome) if self._protocol in _WITH_STATUS else as_text(outcome))
            await error.finish()
        await self._peer.leave()

    def discard_input(self) -> None:
        for stream in self._streams.values():
            stream.incoming.discard()


def _names(wanted: Streams, protocol: str) -> set[str]:
    names = {"error"}
    if wanted.stdin:
        names.add("stdin")
    if wanted.stdout:
        names.add("stdout")
    if wanted.stderr:
        names.add("stderr")
    if wanted.tty and protocol in _WITH_RESIZE:
        names.add("resize")
    return names
