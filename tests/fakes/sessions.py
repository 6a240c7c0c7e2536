"""Sessions in memory; the test scripts the guest's command or console."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from virtshim.model.errors import ShimError
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import AttachStreams, Ended, ExecRequest, Output, OutStream


class FakeSession:
    """Implements `virtshim.streaming.ports.StreamSession`. `script` plays the guest; what it returns is the exit code."""

    def __init__(self, script: Callable[[FakeSession], Awaitable[int]]) -> None:
        self.stdin: asyncio.Queue[bytes] = asyncio.Queue(4)  # b"" is the end
        self.sizes: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.taken = 0
        self._over = asyncio.Event()  # nobody reads the input any more
        self._out: asyncio.Queue[Output | Ended | ShimError] = asyncio.Queue(1)
        self._guest = asyncio.create_task(self._play(script))

    async def _play(self, script: Callable[[FakeSession], Awaitable[int]]) -> None:
        try:
            code = await script(self)
        except ShimError as exc:
            self._over.set()
            await self._out.put(exc)
        else:
            self._over.set()
            await self._out.put(Ended(code))

    # --- for the script

    async def out(self, data: bytes, stream: OutStream = OutStream.STDOUT) -> None:
        await self._out.put(Output(stream, data))

    async def err(self, data: bytes) -> None:
        await self.out(data, OutStream.STDERR)

    # --- the port

    async def read(self) -> Output | Ended:
        event = await self._out.get()
        if isinstance(event, ShimError):
            raise event
        return event

    async def write_stdin(self, data: bytes) -> None:
        if await self._put(data):
            self.taken += len(data)

    async def close_stdin(self) -> None:
        await self._put(b"")

    async def resize(self, width: int, height: int) -> None:
        await self.sizes.put((width, height))

    async def close(self) -> None:
        assert not self.closed.is_set(), "closed twice"
        self._guest.cancel()
        self.closed.set()

    async def _put(self, data: bytes) -> bool:
        """Queues the data; False if nobody reads any more."""
        put, over = asyncio.create_task(self.stdin.put(data)), asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait((put, over), return_when=asyncio.FIRST_COMPLETED)
            return put.done()
        finally:
            put.cancel()
            over.cancel()


class FakeSessions:
    """Implements `virtshim.streaming.ports.Execs` and `Attaches`. `refuse` is raised instead of starting."""

    def __init__(self) -> None:
        self.script: Callable[[FakeSession], Awaitable[int]] = echo
        self.refuse: Exception | None = None
        self.started: list[FakeSession] = []
        # On which the newest was started.
        self.loop: asyncio.AbstractEventLoop | None = None
        self.requests: list[ExecRequest | AttachStreams] = []
        self.dialed: list[tuple[ContainerId, int]] = []

    async def start(self, request: ExecRequest) -> FakeSession:
        return self._made(request)

    async def dial(self, container: ContainerId, port: int) -> FakeSession:
        self.dialed.append((container, port))
        return self._made(None)

    async def attach(self, request: AttachStreams) -> FakeSession:
        return self._made(request)

    def _made(self, request: ExecRequest | AttachStreams | None) -> FakeSession:
        if request is not None:
            self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        self.loop = asyncio.get_running_loop()
        session = FakeSession(self.script)
        self.started.append(session)
        return session


async def echo(session: FakeSession) -> int:
    """Echoes its input as cat does, and ends with it."""
    while data := await session.stdin.get():
        await session.out(data)
    return 0
