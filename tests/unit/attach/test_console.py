"""All clients of a console share it. A real Unix socket that serves one connection, as QEMU's does, plays QEMU."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from virtshim.attach.console import MAX_CLIENTS, MAX_WAITING, ConsoleAttach, ConsoleSession, ConsoleSizes
from virtshim.model.errors import ResourceExhausted, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.streaming.ports import AttachStreams, Ended, Output, Streams

VM = ContainerId("c" * 64)
BOTH = Streams(stdin=True, stdout=True)
TTY = Streams(stdin=True, stdout=True, tty=True)
WATCHED = Streams(stdout=True, tty=True)
QUIET = ConsoleSizes(lambda *_: None)


class Qemu:
    """Listens on the console socket of `VM`."""

    def __init__(self, layout: Layout) -> None:
        self.path = layout.console_socket(VM)
        Path(self.path).parent.mkdir(parents=True)
        self.readers: list[asyncio.StreamReader] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.connected = asyncio.Event()
        self.left = asyncio.Event()
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.readers.append(reader)
        self.writers.append(writer)
        self.reader, self.writer = reader, writer
        self.left.clear()
        self.connected.set()

    async def says(self, data: bytes) -> None:
        await asyncio.wait_for(self.connected.wait(), 5)
        assert self.writer is not None
        self.writer.write(data)
        await self.writer.drain()

    async def hears(self, count: int) -> bytes:
        await asyncio.wait_for(self.connected.wait(), 5)
        assert self.reader is not None
        return await asyncio.wait_for(self.reader.readexactly(count), 5)

    async def hears_the_end(self) -> bytes:
        assert self.reader is not None
        rest = await asyncio.wait_for(self.reader.read(), 5)
        self.connected.clear()
        return rest

    def end(self) -> None:
        assert self.writer is not None
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def qemu(layout: Layout) -> AsyncIterator[Qemu]:
    vm = Qemu(layout)
    server = await asyncio.start_unix_server(vm.serve, vm.path)
    try:
        yield vm
    finally:
        server.close()
        for writer in vm.writers:
            writer.transport.abort()
        await asyncio.sleep(0)


@pytest.fixture
def layout() -> Iterator[Layout]:
    with tempfile.TemporaryDirectory(prefix="con-") as short:
        yield Layout(state_dir=short, run_dir=short)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def request(streams: Streams = BOTH, *, once: bool = False) -> AttachStreams:
    return AttachStreams(VM, streams, once)


async def output(session: ConsoleSession, until: bytes) -> bytes:
    seen = b""
    while until not in seen:
        event = await asyncio.wait_for(session.read(), 5)
        assert isinstance(event, Output), (event, seen)
        seen += event.data
    return seen


def test_all_clients_of_a_vm_share_one_connection_and_see_the_same(layout):
    async def test() -> None:
        async with qemu(layout) as vm:
            hub = ConsoleAttach(layout, QUIET)
            sessions = [await hub.attach(request()) for _ in range(3)]
            await vm.says(b"login: ")
            for session in sessions:
                assert await output(session, b"login: ") == b"login: "
            assert len(vm.readers) == 1
            for session in sessions:
                await session.close()

    run(test)


def test_input_of_every_client_reaches_the_guest(layout):
    async def test() -> None:
        async with qemu(layout) as vm:
            hub = ConsoleAttach(layout, QUIET)
            first, second = await hub.attach(request()), await hub.attach(request())
            await first.write_stdin(b"one ")
            assert await vm.hears(4) == b"one "
            await second.write_stdin(b"two ")
            assert await vm.hears(4) == b"two "
            await first.close()
            await second.close()

    run(test)


def test_the_connection_closes_with_the_last_client_and_opens_with_the_next(layout):
    async def test() -> None:
        async with qemu(layout) as vm:
            hub = ConsoleAttach(layout, QUIET)
            for number in range(1, 4):
                session = await hub.attach(request())
                await vm.says(b"hello")
                await output(session, b"hello")
                await session.close()
                assert await vm.hears_the_end() == b""
                assert len(vm.readers) == number
            assert not hub.connected

    run(test)


def test_input_is_not_cut_off_when_the_last_client_leaves(layout):
    async def test() -> None:
        async with qemu(layout) as vm:
            session = await ConsoleAttach(layout, QUIET).attach(request())
            await vm.says(b"#")
            await session.write_stdin(b"poweroff\n")
            closing = asyncio.create_task(session.close())
            assert await vm.hears_the_end() == b"poweroff\n"
            await closing

    run(test)


def test_a_guest_that_takes_no_input_blocks_its_client_and_fills_no_memory(layout):
    async def test() -> None:
        async with qemu(layout) as vm:
            session = await ConsoleAttach(layout, QUIET).attach(request())
            await vm.says(b"#")
            data = b"x" * (8 << 20)
            tracemalloc.start()
            try:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(session.write_stdin(data), 0.3)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak < 1 << 20
            await session.close()

    run(test)


def test_a_slow_client_loses_output_and_is_told_while_other_clients_lose_nothing(layout):
    async def test() -> None:
        async with qemu(layout) as vm:
            hub = ConsoleAttach(layout, QUIET)
            slow, quick = await hub.attach(request()), await hub.attach(request())
            total = MAX_WAITING + (256 << 10)
            saying = asyncio.create_task(vm.says(b"#" * total + b"end"))
            assert len(await output(quick, b"end")) == total + 3
            await saying
            seen = await output(slow, b"end")
            assert f"{(256 << 10) + 3} bytes lost".encode() in seen
            assert seen.count(b"#") == MAX_WAITING - 3
            await slow.close()
            await quick.close()

    run(test)


def test_sessions_end_after_the_last_output_when_the_vm_ends(layout):
    async def test() -> None:
        async with qemu(layout) as vm:
            hub = ConsoleAttach(layout, QUIET)
            sessions = [await hub.attach(request()) for _ in range(2)]
            await vm.says(b"halted")
            await output(sessions[0], b"halted")
            vm.end()
            assert await sessions[0].read() == Ended(0)
            await sessions[0].write_stdin(b"anybody there?")
            with pytest.raises(Unavailable, match="ended"):
                await hub.attach(request())
            assert [await sessions[1].read() for _ in range(2)][1] == Ended(0)
            for session in sessions:
                await session.close()

    run(test)


def test_attach_to_a_missing_vm_is_an_error(layout):
    async def test() -> None:
        hub = ConsoleAttach(layout, QUIET)
        with pytest.raises(Unavailable, match="the VM has ended"):
            await hub.attach(request())
        assert not hub.connected

    run(test)


def test_more_clients_than_the_limit_are_refused(layout):
    async def test() -> None:
        async with qemu(layout):
            hub = ConsoleAttach(layout, QUIET)
            sessions = [await hub.attach(request()) for _ in range(MAX_CLIENTS)]
            with pytest.raises(ResourceExhausted, match=str(MAX_CLIENTS)):
                await hub.attach(request())
            await sessions.pop().close()
            sessions.append(await hub.attach(request()))
            for session in sessions:
                await session.close()

    run(test)


def test_stdin_once_ends_the_input_with_its_first_client(layout):
    async def test() -> None:
        async with qemu(layout):
            hub = ConsoleAttach(layout, QUIET)
            watcher = await hub.attach(request(Streams(stdout=True), once=True))
            await watcher.close()
            first = await hub.attach(request(once=True))
            await first.close()
            with pytest.raises(WrongState, match="stdinOnce"):
                await hub.attach(request(once=True))
            again = await hub.attach(request(Streams(stdout=True), once=True))
            await again.close()

    run(test)


def test_a_terminal_that_closes_its_input_has_detached_and_the_others_stay(layout):
    async def test() -> None:
        async with qemu(layout) as vm:
            hub = ConsoleAttach(layout, QUIET)
            terminal, piped, watcher = [await hub.attach(request(s)) for s in (TTY, BOTH, WATCHED)]
            for session in (terminal, piped, watcher):
                await session.close_stdin()
            assert await asyncio.wait_for(terminal.read(), 5) == Ended(0)
            await terminal.close()
            await vm.says(b"login: ")
            for session in (piped, watcher):
                assert await output(session, b"login: ") == b"login: "
                await session.close()

    run(test)


def test_without_stdin_nothing_reaches_the_guest(layout):
    async def test() -> None:
        async with qemu(layout) as vm:
            hub = ConsoleAttach(layout, QUIET)
            deaf, typist = await hub.attach(request(Streams(stdout=True))), await hub.attach(request())
            await deaf.write_stdin(b"never")
            await deaf.resize(80, 24)
            await deaf.close_stdin()
            await typist.write_stdin(b"this")
            assert await vm.hears(4) == b"this"
            await deaf.close()
            await typist.close()

    run(test)


def test_clients_that_come_and_go_at_once_leave_no_connection(layout):
    async def test() -> None:
        async with qemu(layout) as vm:
            hub = ConsoleAttach(layout, QUIET)

            async def visit() -> None:
                session = await hub.attach(request())
                await session.write_stdin(b"x")
                await session.close()

            await asyncio.gather(*(visit() for _ in range(MAX_CLIENTS)))
            heard = [await asyncio.wait_for(reader.read(), 5) for reader in vm.readers]
            assert b"".join(heard) == b"x" * MAX_CLIENTS
            assert not hub.connected

    run(test)


class SlowGuest:
    """Takes terminal sizes, and blocks on each until `go` is set."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.asked = threading.Event()
        self.go = threading.Event()
        self.told_twice = threading.Event()

    def tell(self, container: ContainerId, columns: int, rows: int, timeout: float) -> None:
        self.asked.set()
        assert self.go.wait(10)
        self.told.append((columns, rows))
        if len(self.told) == 2:
            self.told_twice.set()


def test_the_newest_terminal_size_reaches_the_guest_and_no_client_waits_for_that(layout):
    guest = SlowGuest()

    async def test() -> None:
        async with qemu(layout) as vm:
            hub = ConsoleAttach(layout, ConsoleSizes(guest.tell))
            session, plain = await hub.attach(request(TTY)), await hub.attach(request())
            await session.resize(80, 24)
            await asyncio.to_thread(guest.asked.wait, 10)
            for columns in range(81, 132):  # a window that is dragged
                await session.resize(columns, 40)
            await session.resize(0, 40)
            await session.resize(1 << 20, 40)
            await plain.resize(9, 9)
            await vm.says(b"prompt")
            assert await output(session, b"prompt") == b"prompt"
            guest.go.set()
            await asyncio.to_thread(guest.told_twice.wait, 10)
            assert guest.told == [(80, 24), (131, 40)]
            await session.close()
            await plain.close()

    run(test)


def test_a_guest_that_takes_no_terminal_size_disturbs_no_client(layout):
    asked = threading.Event()

    def tell(*_: object) -> None:
        asked.set()
        raise Unavailable("no guest agent answers")

    async def test() -> None:
        async with qemu(layout) as vm:
            session = await ConsoleAttach(layout, ConsoleSizes(tell)).attach(request(TTY))
            await session.resize(80, 24)
            await asyncio.to_thread(asked.wait, 10)
            await session.write_stdin(b"typed")
            assert await vm.hears(5) == b"typed"
            await session.close()

    run(test)


def test_a_client_can_leave_while_a_slow_guest_takes_the_terminal_size(layout):
    guest = SlowGuest()

    async def test() -> None:
        async with qemu(layout):
            session = await ConsoleAttach(layout, ConsoleSizes(guest.tell)).attach(request(TTY))
            await session.resize(80, 24)
            await asyncio.to_thread(guest.asked.wait, 10)
            await asyncio.wait_for(session.close(), 5)
            guest.go.set()

    run(test)
