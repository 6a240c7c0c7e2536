"""Floods, escape sequences, forged log lines and endless lines on a console do no harm."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fakes.clock import FakeClock

from virtshim.attach.console import MAX_CLIENTS, MAX_WAITING, ConsoleAttach, ConsoleSizes, room_for_each
from virtshim.logs.files import LogFile
from virtshim.logs.lines import MAX_CONTENT
from virtshim.logs.tail import Pace, Tail
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.streaming.ports import AttachStreams, Output, OutStream, Streams
from virtshim.system.rate_limits import ReadPace

pytestmark = pytest.mark.hostile

HOSTILE, OTHER = ContainerId("a" * 64), ContainerId("b" * 64)
_LINE = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z stdout [FP] ")


@pytest.fixture
def layout(short_path: Path) -> Layout:
    layout = Layout(state_dir=f"{short_path}/state", run_dir=str(short_path))
    for container in (HOSTILE, OTHER):
        for directory in (layout.socket_dir(container), layout.container_dir(container)):
            Path(directory).mkdir(parents=True)
    return layout


CONSOLES = {
    "a line of the log's own form": b"2026-01-01T00:00:00.000000000Z stderr F forged\n",
    "a line that never ends": b"x" * (5 * MAX_CONTENT),
    "carriage returns without end": b"\r" * (3 * MAX_CONTENT),
    "empty lines without end": b"\n" * 5000,
    "zeros": b"\0" * 50_000 + b"\n",
    "escape sequences": b"\x1b]0;owned\x07\x1b[2J\x1b[8m\x9b31m\n" * 100,
    "bytes that are not UTF-8": bytes(range(256)) * 50,
    "half a character at every end of a piece": "ü".encode()[:1] * (2 * MAX_CONTENT + 1),
    "text that runs right to left": "\u202efed\u2066\n".encode() * 50,
}


def guests_bytes(log: bytes) -> bytes:
    """The guest's bytes, as a reader of the log reconstructs them."""
    out = b""
    *lines, rest = log.split(b"\n")
    assert not rest
    for line in lines:
        head = _LINE.match(line)
        assert head, line[:80]
        content = line[head.end() :]
        assert len(content) <= MAX_CONTENT
        out += content + (b"\n" if head[0].endswith(b"F ") else b"")
    return out


@pytest.mark.parametrize("said", CONSOLES.values(), ids=CONSOLES)
def test_the_log_keeps_its_format_and_all_bytes_of_the_console(layout: Layout, said: bytes) -> None:
    log = Path(layout.container_dir(HOSTILE)) / "0.log"
    Path(layout.console_log(HOSTILE)).write_bytes(said)
    tail = Tail.open(HOSTILE, LogFile.open(str(log)), layout, FakeClock(), Pace())
    tail.turn()
    tail.finish()
    assert guests_bytes(log.read_bytes()) == said


def test_the_log_of_a_flooding_console_stays_small_and_lacks_its_middle(layout: Layout) -> None:
    pace = Pace(log_rate=1000, log_burst=50_000, backlog=100_000)
    log = Path(layout.container_dir(HOSTILE)) / "0.log"
    Path(layout.console_log(HOSTILE)).write_bytes(b"flood\n" * 1_000_000)
    tail = Tail.open(HOSTILE, LogFile.open(str(log)), layout, FakeClock(), pace)
    while tail.turn().more:
        pass
    tail.close()
    assert log.stat().st_size < 500_000
    assert b"bytes of this console were dropped" in log.read_bytes()


# --- attached clients


class Qemu:
    """The console's socket, on the test's loop."""

    def __init__(self) -> None:
        self.writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()

    @classmethod
    async def listening(cls, layout: Layout, container: ContainerId) -> tuple[Qemu, asyncio.Server]:
        qemu = cls()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            qemu.writer = writer
            qemu._connected.set()

        return qemu, await asyncio.start_unix_server(serve, layout.console_socket(container))

    async def says(self, data: bytes) -> None:
        await self._connected.wait()
        assert self.writer is not None
        self.writer.write(data)
        await self.writer.drain()

    async def says_byte_by_byte(self, data: bytes) -> None:
        """Sends single bytes; readers get turns of the loop in between."""
        for at in range(len(data)):
            await self.says(data[at : at + 1])
            for _ in range(3):
                await asyncio.sleep(0)


def run(layout: Layout, test: Callable[[ConsoleAttach, Qemu, Qemu], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        hostile, one = await Qemu.listening(layout, HOSTILE)
        other, two = await Qemu.listening(layout, OTHER)
        try:
            await test(ConsoleAttach(layout, ConsoleSizes(lambda *_: None)), hostile, other)
        finally:
            for server in (one, two):
                server.close()
            for qemu in (hostile, other):
                if qemu.writer is not None:
                    qemu.writer.transport.abort()
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(whole(), 60))


WATCH = Streams(stdout=True)


def test_clients_that_do_not_read_hold_at_most_four_mebibytes_in_total(layout: Layout) -> None:
    async def test(hub: ConsoleAttach, hostile: Qemu, other: Qemu) -> None:
        idle = [await hub.attach(AttachStreams(HOSTILE, WATCH)) for _ in range(MAX_CLIENTS)]
        for _ in range(64):
            await hostile.says(b"x" * 65536)
        await hostile.says(b"END")
        seen = b""
        while not seen.endswith(b"END"):
            event = await idle[0].read()
            assert isinstance(event, Output)
            seen += event.data
        held = 0
        for session in idle[1:]:
            last = b""
            while not last.endswith(b"END"):
                event = await session.read()
                assert isinstance(event, Output)
                last = event.data
                held += last.count(b"x")
        assert 0 < held <= 4 << 20
        quiet = await hub.attach(AttachStreams(OTHER, WATCH))
        await other.says(b"login: ")
        assert await quiet.read() == Output(OutStream.STDOUT, b"login: ")
        for session in (*idle, quiet):
            await session.close()

    run(layout, test)


def test_each_client_may_hold_at_most_a_mebibyte() -> None:
    assert [room_for_each(clients) for clients in (0, 1, 4, 8, 16)] == [
        MAX_WAITING, MAX_WAITING, MAX_WAITING, MAX_WAITING // 2, MAX_WAITING // 4,
    ]  # fmt: skip


def test_a_console_that_sends_byte_by_byte_is_read_in_batches(layout: Layout) -> None:
    """QEMU sends each byte of a UART separately. Read at once, each byte would be a turn of the loop that all sessions
    share. A thousand reads are unlimited."""

    async def test(hub: ConsoleAttach, hostile: Qemu, other: Qemu) -> None:
        session = await hub.attach(AttachStreams(HOSTILE, WATCH))
        saying = asyncio.create_task(hostile.says_byte_by_byte(b"a" * 4000))
        seen, reads = b"", 0
        while len(seen) < 4000:
            event = await session.read()
            assert isinstance(event, Output)
            seen += event.data
            reads += 1
        await saying
        assert seen == b"a" * 4000, "nothing is lost"
        assert reads < 2000
        await session.close()

    run(layout, test)


def test_small_reads_are_rate_limited_and_full_pages_are_not() -> None:
    pace, now = ReadPace(0.0), 0.0
    assert {pace.pause_after(65536, now) for _ in range(10_000)} == {0.0}
    assert {pace.pause_after(1, now) for _ in range(1000)} == {0.0}, "who types does not wait"
    reads = 0
    while now < 10.0:
        now += pace.pause_after(1, now)
        reads += 1
    assert reads <= 2001, "200 a second"
